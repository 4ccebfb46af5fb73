"""Adam and AdamW with 8-bit states, and the storage format of these states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hf_zero.kernels.adam8 import BlockVectors, adam8
from hf_zero.kernels.dynamic8 import BLOCK, dequantize, packed_bytes, quantize
from hf_zero.kernels.vectors import Vectors
from hf_zero.optim.adam import AdamFamily, FusedAdam, rule_of
from hf_zero.optim.elementwise import Applied
from hf_zero.optim.stager import StateForm


class Dynamic8(StateForm):
    """Blocks of 256 codes and a scale, packed into one tensor of bytes; see `hf_zero.kernels.dynamic8`."""

    dtype = torch.uint8

    def __init__(self, *, signed: bool) -> None:
        self._signed = signed

    def stored_numel(self, numel: int) -> int:
        return packed_bytes(numel)

    def values(self, stored: Tensor, numel: int) -> Tensor:
        return dequantize(stored.view(-1), numel, signed=self._signed)

    def store(self, values: Tensor) -> Tensor:
        return quantize(values.reshape(-1), signed=self._signed)


class Adam8Family(AdamFamily):
    """Adam's rule on 8-bit states."""

    kind = BlockVectors
    _FORMS = {"exp_avg": Dynamic8(signed=True), "exp_avg_sq": Dynamic8(signed=False)}

    def form_of(self, name: str) -> StateForm | None:
        return self._FORMS.get(name)

    def update(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], vectors: Vectors, step: int, applied: Applied
    ) -> None:
        assert isinstance(vectors, BlockVectors)
        adam8(vectors, rule_of(optimizer, group), step, applied)


class AdamW8bit(FusedAdam):
    """AdamW with both states in the dynamic 8-bit code, together 2.03 bytes per parameter.

    States of small tensors are also stored in 8 bits, because the flat shards of an engine have no small tensors, and
    checkpoints with and without an engine should be interchangeable.

    Args:
        block_size: elements that share a scale; only 256 is supported.
    """

    family = Adam8Family()
    _decoupled = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        block_size: int = BLOCK,
    ) -> None:
        if block_size != BLOCK:
            raise ValueError(f"{type(self).__name__} needs blocks of {BLOCK} elements, got block_size={block_size}")
        super().__init__(params, lr, bias_correction, betas, eps, self._decoupled, weight_decay)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states and convert them back to bytes: torch casts them, losslessly, to the parameter's dtype."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name, value in state.items():
                form = self.family.form_of(name)
                if form is not None:
                    state[name] = value.to(form.dtype)


class Adam8bit(AdamW8bit):
    """`AdamW8bit` with weight decay added to the gradient."""

    family = AdamW8bit.family

    _decoupled = False
