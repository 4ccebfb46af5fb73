"""The gather plan: which units stay gathered, decided once from the config's limits, the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Units gathered before an update ends. The first one is often an embedding, which hardly computes.
MOST_BESIDE_UPDATE = 2


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Rules of one engine, by position in the execution order of hooked modules.

    Attributes:
        kept_for_backward: positions kept gathered after a training forward.
        kept_for_inference: positions kept gathered after a forward without gradients, until training resumes.
        needed_in_backward: positions whose parameters backward may read on some rank.
        prefetch_numel: maximum number of elements in flight before their use; above 0: at least one unit.
        max_live_numel: maximum number of elements gathered or in flight.
    """

    kept_for_backward: frozenset[int]
    kept_for_inference: frozenset[int]
    needed_in_backward: frozenset[int]
    prefetch_numel: int
    max_live_numel: int

    @property
    def prefetches(self) -> bool:
        """Whether the next unit is gathered while the current one computes."""
        return self.prefetch_numel > 0

    def has_room_for(self, numel: int, *, ahead_numel: int, live_numel: int) -> bool:
        """Whether a unit may be prefetched if all ranks know what comes next. Sizes are in elements.

        Args:
            ahead_numel: of units that are already prefetched.
            live_numel: of units that are gathered.
        """
        if not ahead_numel:
            return self.prefetches
        under_way = ahead_numel + numel
        return under_way <= self.prefetch_numel and live_numel + under_way <= self.max_live_numel


@dataclass(frozen=True, slots=True)
class Use:
    """One position: the indices of its units, and properties that the rules need."""

    units: tuple[int, ...]
    numel: int
    has_trained: bool
    reads_in_backward: bool


def plan_gathers(uses: Sequence[Use], *, max_live_numel: int, max_reuse_numel: int, prefetch_numel: int) -> GatherPlan:
    """Apply stage3_max_live_parameters, stage3_max_reuse_distance and stage3_prefetch_bucket_size (elements).

    The reuse distance is the number of elements gathered between two uses. Backward runs in reverse, so the last units
    are reused first: from the end, as many are kept as both limits allow. Without a backward pass the first units are
    kept, because the next forward begins with them.
    """
    return GatherPlan(
        kept_for_backward=_kept_for_backward(uses, max_live_numel, max_reuse_numel),
        kept_for_inference=_kept_for_inference(uses, max_live_numel),
        needed_in_backward=_needed_in_backward(uses),
        prefetch_numel=prefetch_numel,
        max_live_numel=max_live_numel,
    )


def merge_orders(orders: Sequence[Sequence[int]], num_positions: int) -> list[int]:
    """Merge the ranks' orders into one order of all positions that respects each of them unless they contradict.

    If several positions may come next, or orders contradict, the lowest position goes first.
    """
    before: dict[int, set[int]] = {position: set() for position in range(num_positions)}
    for order in orders:
        for earlier, later in zip(order, order[1:], strict=False):
            before[later].add(earlier)
    merged: list[int] = []
    left = set(range(num_positions))
    while left:
        free = [position for position in left if not before[position] & left]
        chosen = min(free or left)
        merged.append(chosen)
        left.remove(chosen)
    return merged


def _kept_for_backward(uses: Sequence[Use], max_live_numel: int, max_reuse_numel: int) -> frozenset[int]:
    kept: set[int] = set()
    kept_units: set[int] = set()
    live, behind = 0, 0
    next_use: dict[int, int] = {}  # per unit: the elements after its next use in this forward
    for position in reversed(range(len(uses))):
        use = uses[position]
        known = [next_use[unit] for unit in use.units if unit in next_use]
        distance = behind - max(known) if known else 2 * behind
        wanted = known or use.reads_in_backward
        added = 0 if kept_units.issuperset(use.units) else use.numel
        if wanted and distance <= max_reuse_numel and live + added <= max_live_numel:
            kept.add(position)
            kept_units.update(use.units)
            live += added
        behind += use.numel
        next_use.update(dict.fromkeys(use.units, behind))
    return frozenset(kept)


def _kept_for_inference(uses: Sequence[Use], max_live_numel: int) -> frozenset[int]:
    kept: set[int] = set()
    live = 0
    seen: set[int] = set()
    for position, use in enumerate(uses):
        live += 0 if seen.issuperset(use.units) else use.numel
        seen.update(use.units)
        if live > max_live_numel:
            break
        kept.add(position)
    return frozenset(kept)


def _needed_in_backward(uses: Sequence[Use]) -> frozenset[int]:
    """Positions that read their parameters in backward, from the first trained position on."""
    first = next((position for position, use in enumerate(uses) if use.has_trained), len(uses))
    return frozenset(position for position in range(first, len(uses)) if uses[position].reads_in_backward)
