"""What can be compressed in a model: weights with their names, and which of their dimensions is which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

LayerKind = Literal["linear", "conv", "embedding", "packed"]
_ADAPTERS = (".lora_", "lora_embedding")


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A weight and the module that reads it.

    Attributes:
        name: of the module; of the parameter, where a module has several weights of its own (experts packed in one).
        out_dim, in_dim: of the weight; -1 where rows and columns have no meaning.
        host: around whose forward the weight is read; another module than its owner in torch's MultiheadAttention.
    """

    name: str
    module: nn.Module
    weight: str
    kind: LayerKind
    out_dim: int
    in_dim: int
    host: nn.Module

    @property
    def parameter(self) -> nn.Parameter:
        """The weight; at stage 3 its true shape, whatever it shows."""
        found = dict.__getitem__(self.module._parameters, self.weight)
        assert found is not None
        return found

    @property
    def bias(self) -> nn.Parameter | None:
        return dict.get(self.module._parameters, "bias") if self.kind in ("linear", "conv") else None

    @property
    def num_out(self) -> int:
        return int(self.parameter.shape[self.out_dim])

    @property
    def num_in(self) -> int:
        return int(self.parameter.shape[self.in_dim])

    @property
    def takes_inputs(self) -> bool:
        """Whether its inputs come as the first argument of its own forward."""
        return self.kind in ("linear", "conv") and self.host is self.module


def layers_of(model: nn.Module) -> list[Layer]:
    """All weights that can be compressed, in the order of registration, each module once. Adapters are left alone."""
    found: list[Layer] = []
    hosts = {id(module.out_proj): module for module in model.modules() if isinstance(module, nn.MultiheadAttention)}
    for name, module in model.named_modules():
        if not any(adapter in f".{name}" for adapter in _ADAPTERS):
            found += _layers_in(name, module, hosts.get(id(module), module))
    return found


def _layers_in(name: str, module: nn.Module, host: nn.Module) -> Iterator[Layer]:
    if isinstance(module, nn.Linear):
        yield Layer(name, module, "weight", "linear", 0, 1, host)
    elif is_transposed(module):
        yield Layer(name, module, "weight", "linear", 1, 0, host)
    elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        yield Layer(name, module, "weight", "conv", 0, 1, host)
    elif isinstance(module, nn.Embedding):
        yield Layer(name, module, "weight", "embedding", -1, -1, host)
    elif not isinstance(module, nn.RNNBase):
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and parameter.is_floating_point() and parameter_name != "bias_k":
                path = f"{name}.{parameter_name}" if name else parameter_name
                yield Layer(path, module, parameter_name, "packed", -1, -1, host)


def is_transposed(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear layer whose weight is (inputs, outputs)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and "weight" in module._parameters
