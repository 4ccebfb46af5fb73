"""The pass under way in each direction: for which module a unit is gathered, and when it has been used.

forward     enter 0 | gather 0, ask for 1 | compute | enter 1 | ...                         ascending
backward    output of 1 needs a gradient | gather 1, ask for 0 | compute | ...              descending
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hf_zero.comm import ledger
from hf_zero.params.hooked_modules import ExecutionOrder, HookedModule
from hf_zero.params.prefetcher import Prefetcher
from hf_zero.params.unit import Unit


@dataclass(slots=True)
class _Frame:
    """One running forward of a hooked module: what it has gathered, including what it reads of other modules."""

    hooked: HookedModule
    units: list[Unit]


class Forward:
    """The forwards of hooked modules that are running, one inside the other.

    Attributes:
        trains: whether the pass under way, or the last one, is to be differentiated.
        seen: positions in the order in which that pass has first entered them.
        is_out_of_order: some pass has gone another way than the execution order.
    """

    def __init__(self, order: ExecutionOrder, prefetcher: Prefetcher) -> None:
        self._order = order
        self._prefetcher = prefetcher
        self._frames: list[_Frame] = []
        self._subtree: tuple[int, ...] = ()
        self.trains = False
        self.seen: list[int] = []
        self.is_out_of_order = False

    @property
    def is_running(self) -> bool:
        return bool(self._frames)

    @property
    def in_use(self) -> set[Unit]:
        return {unit for frame in self._frames for unit in frame.units}

    def begin(self, hooked: HookedModule, *, trains: bool) -> None:
        """`hooked` is the first to be entered."""
        self.trains = self._prefetcher.trains = trains
        self._subtree = hooked.subtree
        self.seen = []

    def enter(self, hooked: HookedModule) -> None:
        """Gather what `hooked` has, and ask for what comes after it in this pass."""
        self._frames.append(_Frame(hooked, list(hooked.units)))
        here = hooked.position
        if here is None:
            return
        if here not in self.seen:
            self.seen.append(here)
        with ledger.phase("forward"):
            for unit in hooked.units:
                self._prefetcher.gather(unit)
            self._prefetcher.prefetch(position for position in self._subtree if position > here)

    def read(self, unit: Unit) -> None:
        """The innermost module reads a parameter of another one: gather it for that."""
        with ledger.phase("forward"):
            self._prefetcher.gather(unit)
        self._frames[-1].units.append(unit)

    def leave(self, hooked: HookedModule) -> Sequence[Unit]:
        """Release what nobody around uses and the gather plan does not keep. Returns what `hooked` has read."""
        frame = self._frames.pop()
        for unit in frame.units:
            if not any(unit in other.units for other in self._frames) and not self._keeps(hooked, unit):
                unit.release()
        return frame.units

    def _keeps(self, hooked: HookedModule, unit: Unit) -> bool:
        if unit not in hooked.units:
            return False  # read by a hooked module that it does not belong to
        plan = self._order.gather_plan
        return hooked.position in (plan.kept_for_backward if self.trains else plan.kept_for_inference)

    def end(self) -> None:
        """The first module that was entered has been left. Collective."""
        self._prefetcher.end_pass(in_backward=False)
        self.is_out_of_order = self.is_out_of_order or self.seen != sorted(self.seen)

    def abandon(self) -> None:
        """Nobody will say when what is running ends."""
        self._frames.clear()

    def forget_order(self) -> None:
        """The execution order is another one now."""
        self.seen = []
        self.is_out_of_order = False


@dataclass(slots=True)
class _Descent:
    """How far a backward has come."""

    cursor: int  # everything at this position and above has had its turn
    entered: set[int] = field(default_factory=set)  # positions that backward has reached itself
    holders: dict[Unit, HookedModule] = field(default_factory=dict)  # on whose behalf a unit is gathered
    reached: HookedModule | None = None  # whose output's gradient came last: its own backward is not over

    def enter(self, position: int) -> None:
        """Backward reaches `position`."""
        if position in self.entered:  # again: the graph holds more than one pass, and the next one begins
            self.cursor = position
            self.entered.clear()
        self.entered.add(position)
        self.cursor = min(self.cursor, position)


class Backward:
    """The backward pass under way, if there is one.

    Attributes:
        num_passes: forward passes that backward may have to walk through.
    """

    def __init__(
        self, order: ExecutionOrder, prefetcher: Prefetcher, on_progress: Callable[[int | None], None]
    ) -> None:
        """`on_progress`: told from which position on backward is done; None: it will come back for another pass."""
        self._order = order
        self._prefetcher = prefetcher
        self._on_progress = on_progress
        self._descent: _Descent | None = None
        self.num_passes = 0

    @property
    def is_under_way(self) -> bool:
        return self._descent is not None

    def reach(self, hooked: HookedModule, units: Sequence[Unit]) -> None:
        """The gradient of an output of `hooked` has come; its backward reads `units`."""
        if self._descent is not None:
            self._descent.reached = None
        self.gather(hooked, units)
        assert self._descent is not None, "it has begun"
        self._descent.reached = hooked

    def gather(self, hooked: HookedModule | None, units: Sequence[Unit]) -> None:
        """Gather `units` for `hooked`, which backward has come to or whose forward it runs again, and ask for what
        comes after it. None: somebody else reads them."""
        if not units:
            return
        with ledger.phase("backward"):
            descent = self._descent or self._begin()
            if hooked is not None:
                self._release_used_up(descent, hooked)
                if hooked.position is not None and not hooked.is_container:
                    descent.enter(hooked.position)
                    self._report(descent.cursor)
            for unit in units:
                self._prefetcher.gather(unit)
                if hooked is not None and not _is_around(descent.holders.get(unit), hooked):
                    descent.holders[unit] = hooked
            needed = self._order.gather_plan.needed_in_backward
            self._prefetcher.prefetch(position for position in range(descent.cursor - 1, -1, -1) if position in needed)

    def _begin(self) -> _Descent:
        self._prefetcher.in_backward = self._prefetcher.trains = True
        self._descent = _Descent(cursor=len(self._order.by_position))
        self._report(self._descent.cursor)
        return self._descent

    def _report(self, cursor: int) -> None:
        self._on_progress(cursor if self.num_passes <= 1 else None)

    def _release_used_up(self, descent: _Descent, hooked: HookedModule) -> None:
        """Backward has reached `hooked`: what is gathered for modules that are not around it has been used.

        Where `hooked` only runs its forward again, because of a checkpoint around it and others, the module that
        backward has come to still needs what it has.
        """
        for unit, holder in list(descent.holders.items()):
            if holder is descent.reached:
                continue
            # A container may return what it has computed midway, while something in it is still in use.
            apart = id(hooked.module) not in holder.inside and id(holder.module) not in hooked.inside
            if holder is not hooked and apart:
                del descent.holders[unit]
                unit.release()

    def end(self) -> bool:
        """Backward is over, where it was under way, which is returned. Collective then."""
        was_under_way = self.is_under_way
        self._descent, self._prefetcher.in_backward, self.num_passes = None, False, 0
        if was_under_way:
            self._prefetcher.end_pass(in_backward=True)
        return was_under_way


def _is_around(holder: HookedModule | None, hooked: HookedModule) -> bool:
    return holder is not None and id(hooked.module) in holder.inside
