"""Preparation of `initialize`'s arguments: the resolver's view of a model, a loader for a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from hf_zero.config import ModelView
from hf_zero.features import Draw

# Names that a transformers configuration may answer to although its dict has another one (attribute_map).
_ALIASES = ("hidden_size", "hidden_sizes", "text_config")


def model_view(model: nn.Module | None) -> ModelView | None:
    """Configuration and shapes of any module; any configuration that can become a dict will do."""
    if model is None:
        return None
    shapes = tuple(tuple(parameter.shape) for parameter in model.parameters())
    return ModelView(config=config_mapping(getattr(model, "config", None)), shapes=shapes)


def config_mapping(config: Any) -> Mapping[str, object] | None:
    """A model's configuration as a dict, with its aliases; None if it cannot become one."""
    if isinstance(config, Mapping):
        return config
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        plain = getattr(config, "__dict__", None)  # a namespace or dataclass of a hand-written model
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
    """Batches of this rank's part of `dataset` in the sizes and the order that the engine's config asks for.

    Without a curriculum it is shuffled anew when the caller sets `loader.sampler.set_epoch`; an IterableDataset is
    taken as it is and has to yield each rank its own samples. Ranks that share sequences get their
    parts of the same ones.
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
