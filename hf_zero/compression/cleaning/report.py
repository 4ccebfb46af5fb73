"""What compression has saved: parameters, bytes and operations of a model, before and after."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from hf_zero.compression.layers import layers_of


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model is.

    Attributes:
        num_parameters: each tied one once.
        num_nonzero: those that are not zero.
        num_bytes: of the tensors as they are.
        num_packed_bytes: with quantised weights as so many bits and fp32 scales.
        num_flops: of linear layers, per token, and of convolutions, per output position: two for each weight.
    """

    num_parameters: int
    num_nonzero: int
    num_bytes: int
    num_packed_bytes: int
    num_flops: int


@dataclass(frozen=True, slots=True)
class CleaningReport:
    """A model before and after `redundancy_clean`."""

    before: Size
    after: Size

    def __str__(self) -> str:
        lines = ["redundancy_clean:         before          after   ratio"]
        for name, words in (
            ("num_parameters", "parameters"),
            ("num_nonzero", "not zero"),
            ("num_bytes", "bytes"),
            ("num_packed_bytes", "bytes, packed"),
            ("num_flops", "FLOPs per token"),
        ):
            old, new = getattr(self.before, name), getattr(self.after, name)
            lines.append(f"  {words:<16}{old:>14,}{new:>15,}{new / max(1, old):>8.3f}")
        return "\n".join(lines)


def size_of(model: nn.Module, bits: dict[int, tuple[int, int]] | None = None) -> Size:
    """The size of a model of plain tensors.

    Args:
        bits: id of a quantised weight -> (bits, number of scales).
    """
    packed = 0
    parameters = list(model.parameters())
    for parameter in parameters:
        num_bits, num_scales = (bits or {}).get(id(parameter), (8 * parameter.element_size(), 0))
        packed += math.ceil(parameter.numel() * num_bits / 8) + 4 * num_scales
    worked = {id(x.parameter): x.parameter for x in layers_of(model) if x.kind in ("linear", "conv", "packed")}
    return Size(
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_nonzero=sum(int(parameter.count_nonzero()) for parameter in parameters),
        num_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        num_packed_bytes=packed,
        num_flops=2 * sum(parameter.numel() for parameter in worked.values()),
    )
