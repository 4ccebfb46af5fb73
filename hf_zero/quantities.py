"""Numbers and flags of command lines."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmbgt]?)", re.IGNORECASE)
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def count_of(text: str) -> float | None:
    """Parse a count like 7b, 350M, 40G, 1.5e9 or 7000000000; return None for anything else."""
    match = _NUMBER.fullmatch(text.strip())
    return float(match[1]) * _FACTORS[match[2].lower()] if match else None


def bytes_of(text: str) -> float | None:
    """Parse bytes: 80G, 1.5 TB and 5e10 use powers of 1000, 24GiB of 1024. Return None for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        return None
    return float(match[1]) * (1024.0 if match[3] else 1000.0) ** _POWERS[match[2].lower()]


def nearest_flag(flag: str, known: Iterable[str], meant: Mapping[str, str]) -> str:
    """Return the known flag with the most similar spelling, or "".

    Args:
        meant: names of the same flags in other programs.
    """
    shown = {each.replace("_", "-"): each for each in known}
    name = flag.partition("=")[0].replace("_", "-")
    if meant.get(name, "").replace("_", "-") in shown:
        return shown[meant[name].replace("_", "-")]
    begun = [each for each in shown if each.startswith(f"{name}-")]
    close = begun[:1] or difflib.get_close_matches(name, shown, n=1, cutoff=0.75)
    return shown[close[0]] if close else ""


def parse_all(
    parser: argparse.ArgumentParser, words: Sequence[str], meant: Mapping[str, str] | None = None
) -> argparse.Namespace:
    """Parse the arguments. An unknown flag ends the program with a suggestion."""
    known, more = parser.parse_known_args(words)
    if not more:
        return known
    if not more[0].startswith("-"):
        parser.error(f"{more[0]!r} is neither a flag nor the value of one")
    near = nearest_flag(more[0], parser._option_string_actions, meant or {})
    hint = f"did you mean {near}?" if near else "--help lists what there is"
    parser.error(f"there is no flag {more[0]}; {hint}")
