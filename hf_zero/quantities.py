"""Numbers as people write them on command lines."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbgt]?)", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def count_of(text: str) -> float | None:
    """7b, 350M, 40G, 1.5e9, 7000000000; None for anything else."""
    found = _NUMBER.fullmatch(text.strip())
    return float(found[1]) * _FACTORS[found[2].lower()] if found else None


def bytes_of(text: str) -> float | None:
    """80G, 1.5 TB, 5e10: powers of 1000; 24GiB: of 1024; None for anything else."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        return None
    return float(found[1]) * (1024.0 if found[3] else 1000.0) ** _POWERS[found[2].lower()]
