"""Prepares arguments of `initialize`: the resolver's view of a model, and a loader for a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from hf_zero.config import ModelView
from hf_zero.features import Draw

# Attributes that a transformers config may provide under another name than its dict (attribute_map).
_ALIASES = ("hidden_size", "hidden_sizes", "text_config")


def model_view(model: nn.Module | None) -> ModelView | None:
    """Config and shapes of any module; the config may be anything that converts to a dict."""
    if model is None:
        return None
    shapes = tuple(tuple(parameter.shape) for parameter in model.parameters())
    return ModelView(config=config_mapping(getattr(model, "config", None)), shapes=shapes)


def config_mapping(config: Any) -> Mapping[str, object] | None:
    """A model's config as a dict, with its aliases; None if it cannot be converted."""
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        plain = getattr(config, "__dict__", None)  # a namespace or dataclass of a custom model
        return dict(plain) if plain else None
    values = dict(to_dict())
    for name in _ALIASES:
        value = getattr(config, name, None)
        if value is not None and name not in values:
            values[name] = config_mapping(value) if hasattr(value, "to_dict") else value
    return values


class TrainingLoader(DataLoader[Any]):
    """A DataLoader whose batches pass through the engine's training-time features."""

    engine: Any = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        features, parallelism = self.engine.training_features, self.engine.parallelism
        for batch in super().__iter__():
            if features:
                batch = features.on_batch(self.engine.training_progress, batch)
            for groups in parallelism:
                batch = groups.own_part(batch, self.engine.groups.along(groups.name))
            yield batch


def training_loader(engine: Any, dataset: Any, collate_fn: Any = None) -> DataLoader[Any]:
    """A DataLoader over this rank's part of `dataset`, with the batch size and order of the engine's config.

    Without a curriculum, call `loader.sampler.set_epoch` to shuffle differently in each epoch. An IterableDataset is
    used unchanged and must yield different samples on each rank. Ranks that share sequences get their parts of the
    same samples.
    """
    size, drop_last = engine.settings.train_micro_batch_size_per_gpu(), engine.settings.resolved.batch.drop_last
    ranks = engine.groups.data
    is_sized = not isinstance(dataset, IterableDataset)
    draw = Draw(len(dataset) if is_sized else None, engine.settings.samples_per_update(), size, ranks.size, ranks.rank)
    options: dict[str, Any] = {"collate_fn": collate_fn, **engine.training_features.loader_options(draw)}
    if "batch_sampler" in options:
        loader = TrainingLoader(dataset, **options)
    elif not is_sized:
        loader = TrainingLoader(dataset, batch_size=size, drop_last=drop_last, **options)
    else:
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=ranks.size, rank=ranks.rank)
        loader = TrainingLoader(dataset, batch_size=size, sampler=sampler, drop_last=drop_last, **options)
    loader.engine = engine
    return loader
