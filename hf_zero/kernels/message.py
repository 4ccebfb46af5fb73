"""Layout of a quantised message. Integers only, without torch, as traffic formulas use it, too.

    | codes: 8 or 4 bits per element | scales: one bf16 per BLOCK elements |       both end at multiples of 16 bytes

A scale is a bf16. Its rounding moves the largest code of a block by at most a quarter of a step (127 / 512), which
leaves the error of every element within half a step; so it costs nothing, and blocks can be half as long as with fp32
scales in the same bytes. And a code times a scale has at most 15 significant bits: exact in fp32, so that all forms of
the kernels decode to the same bits, with fused multiply-adds or without.
"""

from __future__ import annotations

BLOCK = 128  # elements that share a scale: 1.6% more than 8 bits, 3.1% more than 4
SCALE_BYTES = 2
ALIGN_BYTES = 16
LIMIT = {8: 127, 4: 7}  # the largest code by number of bits


def num_scales(numel: int) -> int:
    return -(-numel // BLOCK)


def code_bytes(numel: int, bits: int) -> int:
    """Bytes before the scales."""
    if bits not in LIMIT:
        raise ValueError(f"quantisation to {bits} bits: only 8 and 4 exist")
    return _aligned(-(-numel * bits // 8))


def message_bytes(numel: int, bits: int) -> int:
    """Bytes of a message of `numel` elements."""
    return code_bytes(numel, bits) + _aligned(num_scales(numel) * SCALE_BYTES)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
