"""A vector stored as an 8-bit message and read as values: frozen weights under ZeRO++."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.kernels.message import BLOCK
from hf_zero.kernels.quantize import read_messages, split_message, write_messages
from hf_zero.offload.vector import Vector, WrappedVector

BITS = 8


class QuantizedVector(WrappedVector):
    """The values of a stored message (1-D, uint8). Changing values only changes the blocks that contain them."""

    def __init__(self, message: Vector, numel: int, dtype: torch.dtype) -> None:
        super().__init__(message, numel, dtype)
        self._values: Tensor | None = None  # while taken
        self._num_fetched = 0

    def fetch(self, *, reads: bool = True) -> None:
        self._num_fetched += 1
        self.stored.fetch()  # a partial write must keep the rest

    def take(self) -> Tensor:
        if self._values is None:
            self._values = self._read(self.stored.take())
        return self._values

    def release(self, *, changed: bool) -> None:
        if changed:
            self._write(self.take())
        self._num_fetched -= 1
        if not self._num_fetched:
            self._values = None
        self.stored.release(changed=changed)

    def view(self) -> Tensor:
        return self._read(self.stored.view())

    def free(self) -> None:
        self.stored.free()

    def _read(self, message: Tensor) -> Tensor:
        values = torch.empty(self.numel, dtype=self.dtype, device=message.device)
        read_messages(message.view(1, -1), values.view(1, -1), BITS)
        return values

    def _write(self, values: Tensor) -> None:
        """Write changed blocks only, because quantizing values again may change them."""
        kept = self.stored.take().view(1, -1)
        fresh = torch.empty_like(kept)
        write_messages(values.view(1, -1), fresh, BITS)
        is_changed = values != self._read(kept)
        missing = -self.numel % BLOCK
        blocks = torch.nn.functional.pad(is_changed, (0, missing)).view(-1, BLOCK).any(dim=1)
        (codes, scales), (new_codes, new_scales) = (split_message(each, self.numel, BITS) for each in (kept, fresh))
        of_elements = blocks.repeat_interleave(BLOCK)[: self.numel]
        codes.copy_(torch.where(of_elements, new_codes, codes))
        scales.copy_(torch.where(blocks, new_scales, scales))
        values.copy_(self._read(kept))
