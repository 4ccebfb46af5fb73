"""Numbers as people read them, and means that leave out what is far off."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

GIB = 1024**3
_SIZES = {"T": 1e12, "G": 1e9, "B": 1e9, "M": 1e6, "K": 1e3, "m": 1e-3, "u": 1e-6}


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without the smallest and the largest part of the values; 0.0 of nothing."""
    assert 0.0 <= trim_percent <= 1.0
    cut = int(trim_percent * len(data))
    kept = sorted(data)[cut : len(data) - cut] or list(data)
    return fmean(kept) if kept else 0.0


def amount(num_bytes: float) -> str:
    """Bytes in the largest unit of which there is at least one: 1.5 MB is 1024 * 1024 * 1.5 bytes, as in DeepSpeed."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(num_bytes) < 1024 or unit == "TB":
            return f"{num_bytes:.2f} {unit}" if unit != "B" else f"{num_bytes:.0f} B"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def number_to_string(num: float, units: str | None = None, precision: int = 2) -> str:
    """In the largest of T, G, M, K, 1, m, u that leaves at least one, or in the one given."""
    if units is None:
        return scaled(num, "", precision=precision)
    return f"{round(num / _SIZES.get(units, 1.0), precision):g} {units}".rstrip()


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    return scaled(flops, "FLOPS", precision=precision) if units is None else number_to_string(flops, units, precision)


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    return scaled(macs, "MACs", precision=precision) if units is None else number_to_string(macs, units, precision)


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    if units is None:
        return scaled(params_num, "", precision=precision, billions="B")
    return number_to_string(params_num, units, precision)


def scaled(number: float, unit: str, *, precision: int = 2, billions: str = "G") -> str:
    """3014656, "MACs" -> 3.01 MMACs; with `billions` the letter for 1e9."""
    if not number:
        return f"0 {unit}".rstrip()
    for size, letter in ((1e12, "T"), (1e9, billions), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (1e-6, "u")):
        if abs(number) >= size or size == 1e-6:
            return f"{round(number / size, precision):g} {letter}{unit}".rstrip()
    raise AssertionError("unreachable")
