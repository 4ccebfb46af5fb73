"""Gathers units around their use, one ahead where it is known what comes next.

    forward     enter 0 | gather 0, ask for 1 | compute | enter 1 | ...                         ascending
    backward    output of 1 needs a gradient | gather 1, ask for 0 | compute | ...              descending

What other ranks do inside and between units is no concern of this module: each rank gathers what it needs when it needs
it, and `hf_zero.comm.negotiation` brings the ranks together. A unit that is entered again within one pass (a layer used
twice, a tied head) is gathered again unless it is still there. The end of a pass is met by all ranks, so that nobody
leaves while others still need its shards.

At first the order in which units are expected is the one in which modules were registered. Where forward turns out to
take another, the ranks agree on that at the step (`reorder`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_zero.comm import Negotiation, Rows, ledger
from hf_zero.params.gather_plan import GatherPlan
from hf_zero.params.hooked_modules import HookedModule
from hf_zero.params.unit import GatherBuffers, Unit


@dataclass(slots=True)
class _Frame:
    """One running forward of a hooked module: what it has gathered, including what it reads of other modules."""

    hooked: HookedModule
    units: list[Unit]


@dataclass(slots=True)
class _Backward:
    """A backward pass under way."""

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


class ParameterCoordinator:
    """Owns when units are gathered and released; see the module's docstring for the rules."""

    def __init__(
        self,
        units: Sequence[Unit],
        hooked_modules: Sequence[HookedModule],
        gather_plan: GatherPlan,
        negotiation: Negotiation,
    ) -> None:
        self.units = tuple(units)
        self._hooked_modules = tuple(hooked_modules)
        self._execution_order = tuple(hooked for hooked in hooked_modules if hooked.position is not None)
        self._gather_plan = gather_plan
        self._negotiation = negotiation
        self._number = negotiation.register(self, len(self.units))
        self._buffers = GatherBuffers()
        for unit in units:
            for part in unit.parts:
                self._buffers.expect(part.layout.row_numel * part.layout.world, part.dtype)
        self._position_of = self._first_positions()
        self._frames: list[_Frame] = []
        self._subtree: tuple[int, ...] = ()
        self._trains = False
        self._backward: _Backward | None = None
        self._in_flight: Unit | None = None
        self._handles: list[Any] = []
        self._seen: list[int] = []  # positions in the order in which this pass has first entered them
        self.is_out_of_order = False
        self._num_passes = 0  # that backward may have to walk through
        self.on_progress: Callable[[int | None], None] = lambda _position: None
        self.has_failed: Callable[[], bool] = lambda: False  # whether this rank could not read its shards
        self.on_kept: Callable[[], None] = lambda: None  # inference has ended, and may have left units gathered
        self.on_training: Callable[[], None] = lambda: None  # what inference had kept is about to be released
        self.on_failure: Callable[[], None] = lambda: None  # some rank could not; all ranks come to this

    # What other ranks need of this one (`negotiation.Source`)

    def name(self, unit: int) -> str:
        return self.units[unit].name

    def open_rows(self, unit: int) -> Sequence[Tensor]:
        return self.units[unit].open_rows()

    def close_rows(self, unit: int) -> None:
        if not self.units[unit].is_in_flight:
            self.units[unit].put_back()

    def take_buffer(self, numel: int, row: Tensor) -> Tensor:
        return self._buffers.take(numel, row)

    def give_buffer(self, rows: Rows) -> None:
        self._buffers.give(rows)

    # Order

    def reorder(self, order: Sequence[int], gather_plan: GatherPlan) -> None:
        """From now on position `i` is the hooked module that was at `order[i]`. Between passes only."""
        assert not self._frames and self._backward is None and self._in_flight is None, "a pass is under way"
        new = {old: position for position, old in enumerate(order)}
        self._execution_order = tuple(self._execution_order[old] for old in order)
        for hooked in self._hooked_modules:
            hooked.position = None if hooked.position is None else new[hooked.position]
            hooked.subtree = tuple(sorted(new[old] for old in hooked.subtree))
        self._gather_plan = gather_plan
        self._position_of = self._first_positions()
        self._seen = []
        self.is_out_of_order = False

    def _first_positions(self) -> dict[Unit, int]:
        """Where each unit is used first."""
        position_of: dict[Unit, int] = {}
        for position, hooked in enumerate(self._execution_order):
            for unit in hooked.units:
                position_of.setdefault(unit, position)
        return position_of

    @property
    def seen(self) -> tuple[int, ...]:
        """Positions in the order in which the last pass entered them."""
        return tuple(self._seen)

    @property
    def execution_order(self) -> tuple[HookedModule, ...]:
        """The hooked modules with units, by position."""
        return self._execution_order

    # Hooks

    def watch(self) -> None:
        """Register the hooks. They stay out of compiled code, where a graph breaks at every unit."""
        assert not self._handles, "already watching"
        for hooked in self._hooked_modules:
            enter = _uncompiled(functools.partial(self._enter, hooked))
            leave = _uncompiled(functools.partial(self._leave, hooked))
            self._handles.append(hooked.module.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(hooked.module.register_forward_hook(leave, always_call=True))

    def unwatch(self) -> None:
        """Take the hooks away and release everything; `watch` brings them back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._frames.clear()
        self.end_backward()
        self.release_all()

    def close(self) -> None:
        """The units are gone."""
        self._negotiation.forget(self._number, len(self.units))

    @property
    def is_running(self) -> bool:
        """Whether a watched forward or a backward is under way, so that a read may gather."""
        return bool(self._frames) or _in_autograd()

    # Forward

    def _enter(self, hooked: HookedModule, _module: nn.Module, _args: Any) -> None:
        hooked.entered.append(_next_node())
        if _in_autograd():
            self._acquire_for_backward(hooked, hooked.units)  # recomputation of a checkpointed forward
            return
        if not self._frames:
            self._begin_pass(hooked)
        self._frames.append(_Frame(hooked, list(hooked.units)))
        if hooked.position is not None:
            self._acquire(hooked)

    def _leave(self, hooked: HookedModule, _module: nn.Module, _args: Any, output: Any) -> None:
        since = hooked.entered.pop()
        if _in_autograd():
            self._watch_outputs(hooked, hooked.units, output, since)
            return
        frame = self._frames.pop()
        self._watch_outputs(hooked, frame.units, output, since)
        for unit in frame.units:
            if not any(unit in other.units for other in self._frames) and not self._keeps(hooked, unit):
                self._release(unit)
        if not self._frames:
            self._end_pass()

    def read(self, unit: Unit) -> None:
        """A module reads a parameter of a unit that is not gathered for it: gather it for the innermost one."""
        if unit.is_gathered:
            return
        if _in_autograd():
            self._acquire_for_backward(None, (unit,))
        elif self._frames:
            with ledger.phase("forward"):
                self._gather(unit)
            self._frames[-1].units.append(unit)

    def _begin_pass(self, hooked: HookedModule) -> None:
        if self._backward is not None:
            self.end_backward()
        trains = torch.is_grad_enabled()
        if trains and not self._trains:
            self.on_training()
            self.release_all()  # what inference had kept
        self._trains = trains
        self._num_passes += trains
        self._subtree = hooked.subtree
        self._seen = []

    def _end_pass(self) -> None:
        self._end_together("forward")
        if not self._trains:
            self.on_kept()
        self.is_out_of_order = self.is_out_of_order or self._seen != sorted(self._seen)

    def _acquire(self, hooked: HookedModule) -> None:
        here = hooked.position
        assert here is not None, "a module without units has nothing to acquire"
        if here not in self._seen:
            self._seen.append(here)
        with ledger.phase("forward"):
            for unit in hooked.units:
                self._gather(unit)
            self._prefetch(position for position in self._subtree if position > here)

    def _keeps(self, hooked: HookedModule, unit: Unit) -> bool:
        if unit not in hooked.units:
            return False  # read by a hooked module that it does not belong to
        kept = self._gather_plan.kept_for_backward if self._trains else self._gather_plan.kept_for_inference
        return hooked.position in kept

    # Backward

    def _watch_outputs(self, hooked: HookedModule, units: Sequence[Unit], output: Any, since: int) -> None:
        """Gather again when backward reaches what was computed here, since node `since`; outputs that were only passed
        through belong to an earlier hooked module, and their turn comes when this one's is long over."""
        if not (units and torch.is_grad_enabled() and hooked.reads_in_backward):
            return
        needed = tuple(units)

        def gather(_grad: Tensor) -> None:
            if self._backward is not None:
                self._backward.reached = None
            self._acquire_for_backward(hooked, needed)
            assert self._backward is not None, "it has begun"
            self._backward.reached = hooked

        for tensor in _tensors(output):
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since:
                tensor.register_hook(gather)

    def _acquire_for_backward(self, hooked: HookedModule | None, units: Sequence[Unit]) -> None:
        if not units:
            return
        with ledger.phase("backward"):
            backward = self._backward
            if backward is None:
                backward = self._backward = _Backward(cursor=len(self._execution_order))
                self._report(len(self._execution_order))
            if hooked is not None:
                self._release_used_up(backward, hooked)
                if hooked.position is not None and not hooked.is_container:
                    backward.enter(hooked.position)
                    self._report(backward.cursor)
            for unit in units:
                self._gather(unit)
                if hooked is not None and not _is_around(backward.holders.get(unit), hooked):
                    backward.holders[unit] = hooked
            below = range(backward.cursor - 1, -1, -1)
            self._prefetch(position for position in below if position in self._gather_plan.needed_in_backward)

    def _report(self, cursor: int) -> None:
        """Backward is done with the positions from `cursor` on; None: it will come back to them for another pass."""
        self.on_progress(cursor if self._num_passes <= 1 else None)

    def _release_used_up(self, backward: _Backward, hooked: HookedModule) -> None:
        """Backward has reached `hooked`: what is gathered for modules that are not around it has been used.

        Where `hooked` only runs its forward again, because of a checkpoint around it and others, the module that
        backward has come to still needs what it has.
        """
        for unit, holder in list(backward.holders.items()):
            if holder is backward.reached:
                continue
            # A container may return what it has computed midway, while something in it is still in use.
            apart = id(hooked.module) not in holder.inside and id(holder.module) not in hooked.inside
            if holder is not hooked and apart:
                del backward.holders[unit]
                self._release(unit)

    def end_backward(self) -> None:
        """The backward pass, if there was one, is over: nothing stays gathered. Collective."""
        backward, self._backward = self._backward, None
        self._num_passes = 0
        if backward is None:
            return
        self._end_together("backward")
        self.release_all()

    # Both ways

    def _end_together(self, phase: str) -> None:
        """Wait until no rank needs this one's shards for the pass that ends here."""
        with ledger.phase(phase):
            self._finish_unwanted()
            if self._negotiation.end(in_backward=phase == "backward", failed=self.has_failed()):
                self.on_failure()

    def _start(self, unit: Unit) -> None:
        in_backward = self._backward is not None
        position = self._position_of[unit]
        order = -position if in_backward else position
        number = self._number + unit.index
        unit.start(self._negotiation.gather(number, order=order, in_backward=in_backward))

    def _gather(self, unit: Unit) -> None:
        if unit.is_gathered:
            return
        if not unit.is_in_flight:
            self._start(unit)
        unit.finish(self._buffers)
        if self._in_flight is unit:
            self._in_flight = None

    def _prefetch(self, positions: Iterable[int]) -> None:
        if self._in_flight is not None or not self._gather_plan.prefetches:
            return
        for position in positions:
            for unit in self._execution_order[position].units:
                if unit.is_gathered:
                    continue
                if self._in_flight is not None:
                    unit.fetch()  # from where shards are kept, so that the gather after this one can start at once
                    return
                self._start(unit)
                self._in_flight = unit

    def _release(self, unit: Unit) -> None:
        if not unit.is_persistent:
            unit.release()

    def _finish_unwanted(self) -> None:
        """What was asked for ahead, and turned out not to be needed."""
        unit, self._in_flight = self._in_flight, None
        if unit is not None:
            unit.discard(self._buffers)

    def settle(self) -> None:
        """End what is under way and go back to shards, before weights change. Collective: all ranks have come to this
        when it returns."""
        self.end_backward()
        self.release_all()
        self._negotiation.step(self._number)

    def reopen(self) -> None:
        """Weights have changed; they are right again."""
        self._negotiation.reopen()

    def release_all(self) -> None:
        """Back to shards, except persistent units and what a running forward uses."""
        busy = {unit for frame in self._frames for unit in frame.units}
        for unit in self.units:
            if unit not in busy:
                self._release(unit)
                unit.put_back()


def _next_node() -> int:
    """The number that autograd gives to the next operation; later operations have larger ones."""
    return torch._C._autograd._get_sequence_nr()


def _is_around(holder: HookedModule | None, hooked: HookedModule) -> bool:
    return holder is not None and id(hooked.module) in holder.inside


def _in_autograd() -> bool:
    """Whether this code runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of a module's output; of an object that is no container, those among its attributes."""
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)):
            found.extend(value for value in vars(leaf).values() if isinstance(value, Tensor))
    return found


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    # Importing the compiler takes seconds, so it is asked only where it is loaded already.
    if "torch._dynamo" in sys.modules:
        disabled: Callable[..., None] = torch.compiler.disable(hook)
        return disabled
    return hook
