"""A layer with all that is done to it, and the hooks that let its module see the result instead of its weight.

    before the module's forward     weight -> fewer bits -> * sparse -> * rows or channels -> * heads
                                    the first input -> fewer bits
    during it                       module.weight is that tensor: an attribute that shadows the parameter
    after it                        module.weight is the parameter again

So the parameter keeps its name, its place in flat buffers and its shards; at stage 3 it has been gathered when the
hooks look at it. Autograd carries gradients from the tensor to the parameter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hf_zero.extras.compression.bits import ActivationBits, WeightBits
from hf_zero.extras.compression.matching import Layer
from hf_zero.extras.compression.pruning import Pruned


class CompressedLayer:
    """One layer; `watch` registers its hooks, `unwatch` takes them away."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.weight_bits: WeightBits | None = None
        self.activation_bits: ActivationBits | None = None
        self.pruned: dict[str, Pruned] = {}  # by technique, in the order in which they act
        self._handles: list[Any] = []

    def watch(self) -> None:
        host = self.layer.host
        self._handles = [
            host.register_forward_pre_hook(self._enter),
            host.register_forward_hook(self._leave, always_call=True),
        ]

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def effective(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The tensors that replace weight and bias in a forward."""
        if self.weight_bits is not None:
            weight = self.weight_bits.apply(weight)
        for pruned in self.pruned.values():
            mask = pruned.factor()
            if mask is not None:
                weight = weight * pruned.weight_factor(mask).to(weight.dtype)
                factor = pruned.bias_factor(mask)
                if bias is not None and factor is not None:
                    bias = bias * factor.to(bias.dtype)
        return weight, bias

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        owner = self.layer.module
        weight = owner._parameters[self.layer.weight]
        bias = None if self.layer.bias is None else owner._parameters["bias"]
        assert weight is not None
        new_weight, new_bias = self.effective(weight, bias)
        # Looked up before a module's parameters are.
        if new_weight is not weight:
            owner.__dict__[self.layer.weight] = new_weight
        if new_bias is not bias:
            owner.__dict__["bias"] = new_bias
        if self.activation_bits is None or not inputs or not isinstance(inputs[0], Tensor):
            return None
        return (self.activation_bits.apply(inputs[0]), *inputs[1:])

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.layer.module.__dict__.pop(self.layer.weight, None)
        self.layer.module.__dict__.pop("bias", None)
