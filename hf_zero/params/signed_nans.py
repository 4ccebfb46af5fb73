"""NaNs that say whose they are: what a released parameter holds, known again where it comes out.

A NaN has bits to spare, and here they are a number. Copies and conversions to wider types keep them, and so does most
arithmetic of CPUs; that of GPUs, and conversions to narrower types, make plain NaNs of them (IEEE 754-2019, 6.2.3).
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

_FP64_FRACTION = 52  # bits of a float64
# Of each type: the integer of its size, and the bits of its fraction; the first of them says that a NaN is quiet.
_FORMATS = {
    torch.float64: (torch.int64, 52),
    torch.float32: (torch.int32, 23),
    torch.float16: (torch.int16, 10),
    torch.bfloat16: (torch.int16, 7),
}


def signed_nan(number: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A NaN with `number` in it (0-dim), as far as that fits; a plain one where `dtype` has no room."""
    plain = torch.full((), float("nan"), dtype=dtype, device=device)
    if dtype not in _FORMATS:
        return plain
    integer, fraction = _FORMATS[dtype]
    infinity = ((1 << (8 * dtype.itemsize - 1 - fraction)) - 1) << fraction
    plain.view(integer).fill_(infinity | _quiet(dtype) | _payload(number, dtype))
    return plain


def signature(number: int, dtype: torch.dtype) -> int:
    """What `signature_of` finds in `signed_nan(number, dtype)`; 0: nothing that could be known again."""
    if dtype not in _FORMATS:
        return 0
    _, fraction = _FORMATS[dtype]
    return _payload(number, dtype) << (_FP64_FRACTION - fraction)


def signature_of(value: float) -> int:
    """The bits to spare of a NaN; 0 for plain ones, and for numbers."""
    if value == value:
        return 0
    (bits,) = struct.unpack("<Q", struct.pack("<d", value))
    return int(bits) & ((1 << (_FP64_FRACTION - 1)) - 1)


def _quiet(dtype: torch.dtype) -> int:
    return 1 << (_FORMATS[dtype][1] - 1)


def _payload(number: int, dtype: torch.dtype) -> int:
    # Neither all zeros nor all ones: those are the NaNs that processors make themselves.
    return 1 + number % (_quiet(dtype) - 2)
