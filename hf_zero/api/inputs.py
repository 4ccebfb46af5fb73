"""What `initialize` makes of its arguments: of a model what the resolver sees of it, of a dataset a loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from hf_zero.comm import get_rank, get_world_size
from hf_zero.config import ModelView

# Names that a transformers configuration may answer to although its dict has another one (attribute_map).
_ALIASES = ("hidden_size", "hidden_sizes", "text_config")


def model_view(model: nn.Module | None) -> ModelView | None:
    """Configuration and shapes of any module; a configuration is what can become a dict."""
    if model is None:
        return None
    shapes = tuple(tuple(parameter.shape) for parameter in model.parameters())
    return ModelView(config=config_mapping(getattr(model, "config", None)), shapes=shapes)


def config_mapping(config: Any) -> Mapping[str, object] | None:
    """A model's configuration as a dict, its aliases included; None where it is nothing of the kind."""
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


def data_loader(dataset: Any, batch_size: int, *, collate_fn: Any = None, drop_last: bool = False) -> DataLoader[Any]:
    """Batches of this rank's part of `dataset`, shuffled anew when the caller sets `loader.sampler.set_epoch`.

    An IterableDataset is taken as it is: it has to yield each rank its own samples.
    """
    if isinstance(dataset, IterableDataset):
        return DataLoader(dataset, batch_size=batch_size, collate_fn=collate_fn, drop_last=drop_last)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=get_world_size(), rank=get_rank())
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last)
