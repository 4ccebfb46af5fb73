"""What ranks tell each other, and the rule that turns all ranks' first open requests into one decision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

NUM_FIELDS = 5  # integers of an encoded request


class Kind(IntEnum):
    GATHER = 0
    END = 1
    STEP = 2
    WAIT = 3


@dataclass(frozen=True, slots=True)
class Request:
    """A rank's request.

    Attributes:
        unit: number of the unit to gather; for STEP: the first unit of the updated engine.
        order: if ranks request different units, the lowest number is gathered first. This lets ranks that have skipped
            something align with the others again; any number is correct.
        in_backward: whether the request was made in a backward pass.
        trains: whether the request was made in a pass that trains.
        version: number of weight updates on this rank.
        launched: number of reductions that this rank has started, or will start when all ranks have come so far.
        failed: END only: this rank could not read the rows it had to send.
        lets_go: WAIT only: waits for a rank that is at END.
    """

    kind: Kind
    unit: int = -1
    order: int = 0
    in_backward: bool = False
    version: int = 0
    launched: int = 0
    failed: bool = False
    lets_go: bool = False
    trains: bool = True

    def fields(self) -> tuple[int, ...]:
        """NUM_FIELDS integers."""
        flags = self.kind | self.in_backward << 4 | self.failed << 5 | self.lets_go << 6 | self.trains << 7
        return flags, self.unit, self.order, self.version, self.launched

    @classmethod
    def of(cls, fields: Sequence[int]) -> Request:
        flags, unit, order, version, launched = fields
        in_backward, failed, lets_go, trains = (bool(flags >> place & 1) for place in (4, 5, 6, 7))
        return cls(Kind(flags & 15), unit, order, in_backward, version, launched, failed, lets_go, trains)


@dataclass(frozen=True, slots=True)
class Decision:
    """The next action, the same on all ranks.

    Attributes:
        unit: the unit to gather; None: nothing.
        granted: ranks whose request is granted.
        any_failed: all ranks have reached the end of a pass, and some rank could not read its rows.
        facts: every rank's facts, sent with STEP; empty if messages have no room for facts.
    """

    unit: int | None
    granted: frozenset[int]
    any_failed: bool = False
    facts: Sequence[Sequence[int]] = ()


def decide(heads: Sequence[Request]) -> Decision | None:
    """The decision about every rank's first request; None if these contradict each other."""
    if _are_alike(heads):
        return Decision(heads[0].unit, frozenset(range(len(heads))))
    gathers = [head for head in heads if head.kind is Kind.GATHER]
    waits = frozenset(rank for rank, head in enumerate(heads) if head.kind is Kind.WAIT)
    if gathers:
        if len({head.version for head in heads}) > 1:
            return None
        first = min(gathers, key=lambda head: (head.in_backward, head.order, head.unit))
        same = (rank for rank, head in enumerate(heads) if head.kind is Kind.GATHER and head.unit == first.unit)
        return Decision(first.unit, waits.union(same))
    ends = frozenset(rank for rank, head in enumerate(heads) if head.kind is Kind.END)
    if waits:
        lets_go = any(heads[rank].lets_go for rank in waits)
        if lets_go and not ends and len(waits) < len(heads):
            return None  # waits for a rank that is about to update
        return Decision(None, waits | ends if lets_go else waits)
    if ends:
        return Decision(None, ends, len(ends) == len(heads) and any(heads[rank].failed for rank in ends))
    is_one_step = len({(head.unit, head.version, head.launched) for head in heads}) == 1
    return Decision(None, frozenset(range(len(heads)))) if is_one_step else None


def _are_alike(heads: Sequence[Request]) -> bool:
    """Whether all ranks gather the same unit: the usual case, which must be fast."""
    first = heads[0]
    return first.kind is Kind.GATHER and all(
        head.unit == first.unit and head.kind is Kind.GATHER and head.version == first.version for head in heads
    )
