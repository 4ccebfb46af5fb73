"""What the resolver sees of a model that is given to `initialize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

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
