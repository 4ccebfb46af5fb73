"""CRC-32 of a whole from the CRC-32s of its parts, so that parts may be read or written in any order."""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # bit-reversed, as zlib has it
_ONE = 1 << 31  # the polynomial 1 in that order


def combine(first: int, second: int, second_num_bytes: int) -> int:
    """The checksum of two pieces one after the other: shift the first by the second's length, then add."""
    return _multiply(_power_of_x(8 * second_num_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials over GF(2), modulo the CRC polynomial."""
    product, mask = 0, _ONE
    while mask:
        if a & mask:
            product ^= b
            if a & (mask - 1) == 0:
                break
        mask >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)
def _power_of_x(exponent: int) -> int:
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        exponent >>= 1
    return result
