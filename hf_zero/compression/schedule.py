"""When a technique acts, and how strongly: functions of the number of updates, and so the same after a resume."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from hf_zero.config.compression import PruningPolicy, Rule


@dataclass(frozen=True, slots=True)
class BitsNow:
    """Bits of a weight, and the update since which it has had them."""

    bits: int
    since: int


def bits_at(rule: Rule, since_start: int) -> BitsNow:
    """Bits after so many updates of the technique: one less after `period`, the next after twice as long, ...

    12 to 8 bits with period 10: 11 bits from update 10 on, 10 from 20, 9 from 40, 8 from 80.
    """
    bits, due, since = rule.start_bits, rule.period, 0
    while bits > rule.bits and since_start >= due:
        bits, since, due = bits - 1, due, 2 * due
    return BitsNow(bits, since)


def exact_share(change_ratio: float | None, since_change: int) -> float:
    """Share of the exact weight in a soft transition: 1 at a change of bits, less by `change_ratio` every update."""
    return 0.0 if change_ratio is None else max(0.0, 1.0 - change_ratio * since_change)


def number_kept(dense_ratio: float, total: int) -> int:
    """The smallest whole number that is at least dense_ratio * total, of the ratio as it is written in decimals."""
    return math.ceil(Fraction(str(dense_ratio)) * total)


def is_pruning_due(policy: PruningPolicy, updates: int) -> bool:
    """Whether snip_momentum prunes after so many updates."""
    if updates < policy.offset or updates > policy.end:
        return False
    return updates == policy.end or (updates - policy.offset) % policy.stride == 0


def ratio_at(policy: PruningPolicy, dense_ratio: float, updates: int) -> float:
    """snip_momentum: what is kept falls from all to `dense_ratio` by the same factor every update."""
    if updates >= policy.end:
        return dense_ratio
    return float(dense_ratio ** ((updates - policy.offset) / (policy.end - policy.offset)))
