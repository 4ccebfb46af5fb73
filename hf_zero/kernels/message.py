"""Layout of a quantized message. This module only uses integers and no torch, because traffic formulas use it, too.

    | codes: 8 or 4 bits per element | scales: one bf16 per BLOCK elements |       both end at multiples of 16 bytes

Scales are bf16. Rounding a scale moves the largest code of a block by at most a quarter of a step (127 / 512), which
keeps the error of every element within half a step. So there is no loss of accuracy, and blocks can be half as long as
with fp32 scales in the same bytes. The product of a code and a scale has at most 15 significant bits and is exact in
fp32, so that all kernels decode to identical bits, with or without fused multiply-adds.
"""

from __future__ import annotations

BLOCK = 128  # elements that share a scale: overhead 1.6% of 8 bits, 3.1% of 4
SCALE_BYTES = 2
ALIGN_BYTES = 16
LIMIT = {8: 127, 4: 7}  # the largest code by number of bits


def num_scales(numel: int) -> int:
    return -(-numel // BLOCK)


def code_bytes(numel: int, bits: int) -> int:
    """Bytes of the codes, including alignment."""
    if bits not in LIMIT:
        raise ValueError(f"quantization to {bits} bits: only 8 and 4 are supported")
    return _aligned(-(-numel * bits // 8))


def message_bytes(numel: int, bits: int) -> int:
    """Bytes of a message of `numel` elements."""
    return code_bytes(numel, bits) + _aligned(num_scales(numel) * SCALE_BYTES)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
