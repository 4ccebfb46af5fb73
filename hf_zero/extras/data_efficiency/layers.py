"""The stack of layers of a model, and a call put around a layer's forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Around = Callable[..., Any]
"""(the layer's own forward, its positional arguments, its keyword arguments) -> what the layer returns."""


def layer_stack(model: nn.Module) -> list[nn.Module]:
    """The layers that a model runs one after another: the longest list of modules of one class that have parameters.

    Raises:
        ValueError: there is no such list.
    """
    best: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, nn.ModuleList):
            continue
        layers = list(module)
        alike = layers and all(type(layer) is type(layers[0]) for layer in layers)
        if alike and len(layers) > len(best) and any(True for _ in layers[0].parameters()):
            best = layers
    if not best:
        raise ValueError(f"{type(model).__name__} has no list of layers of one class (torch.nn.ModuleList)")
    return best


class WrappedLayers:
    """Calls around the forward of some layers, until `close`.

    The layer's class, its parameters' names and its hooks stay as they are: only this object's `forward` is another,
    inside the hooks that gather its weights and outside a recomputation of its activations.
    """

    def __init__(self) -> None:
        self._wrapped: list[nn.Module] = []

    def wrap(self, layer: nn.Module, around: Around) -> None:
        own = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return around(own, args, kwargs)

        vars(layer)["forward"] = forward
        self._wrapped.append(layer)

    def close(self) -> None:
        for layer in self._wrapped:
            vars(layer).pop("forward", None)
        self._wrapped.clear()


def split_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """The hidden states that a layer is called with, and how to call it with others."""
    if args:
        return args[0], lambda hidden: ((hidden, *args[1:]), kwargs)
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"], lambda hidden: (args, {**kwargs, "hidden_states": hidden})
    raise ValueError(f"a layer is called without hidden states (keywords: {', '.join(kwargs) or 'none'})")


def with_first(output: Any, first: Any) -> Any:
    """A layer's output with other hidden states."""
    return (first, *output[1:]) if isinstance(output, tuple) else first


def first_of(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output
