"""Decides when units are gathered and released, with hooks around forward and, for backward, on its outputs.

    forward     enter 0 | gather 0, request 1 | compute | enter 1 | ...                         ascending
    backward    output of 1 needs a gradient | gather 1, request 0 | compute | ...              descending

Ranks need not run in lockstep inside or between units: each rank requests a unit when it needs it, and
`hf_zero.comm.negotiation` matches the requests. A unit that is entered again within one pass (a layer used
twice, a tied head) is gathered again unless it is still gathered. All ranks synchronise at the end of a pass, so that
no rank leaves while others still need its shards.

Units are first expected in the registration order of modules. If forward uses another order, ranks agree on that order
at the step (`reorder`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_zero.comm import ledger, outside_transforms, uncompiled
from hf_zero.params.edits import ShardedEdits
from hf_zero.params.hooked_modules import ExecutionOrder, HookedModule
from hf_zero.params.prefetcher import Prefetcher
from hf_zero.params.sharded_parameter import HOOK
from hf_zero.params.unit import Unit

_DEEPEST = 4  # nesting of objects in a module's output
_WITHOUT_TENSORS = (bool, int, float, str, bytes, type, nn.Module)  # types without computed tensors


class Forward:
    """The running forwards of hooked modules, nested in each other.

    Attributes:
        trains: whether the current or last pass records gradients.
        seen: positions in the order in which that pass first entered them.
        is_out_of_order: whether some pass deviated from the execution order.
    """

    def __init__(self, order: ExecutionOrder, prefetcher: Prefetcher) -> None:
        self._order = order
        self._prefetcher = prefetcher
        self._gathered: list[list[Unit]] = []  # per forward: its own units, and those read from other modules
        self._first: HookedModule | None = None
        self._caller: FrameType | None = None
        self.trains = False
        self.seen: list[int] = []
        self.is_out_of_order = False

    @property
    def is_running(self) -> bool:
        return bool(self._gathered)

    @property
    def innermost(self) -> Sequence[Unit]:
        """Units of the innermost running forward."""
        return self._gathered[-1]

    @property
    def in_use(self) -> set[Unit]:
        return {unit for units in self._gathered for unit in units}

    def begin(self, hooked: HookedModule, *, trains: bool) -> None:
        """Begin a pass that enters `hooked` first."""
        self.trains = self._prefetcher.trains = trains
        self._first = hooked
        self._caller = _caller_of_hooks()
        self.seen = []

    def is_interrupted(self, hooked: HookedModule | None = None) -> bool:
        """Whether Ctrl-C (KeyboardInterrupt) has ended the current pass, for which torch runs no hooks: the call that
        began the pass is no longer on the stack.

        Args:
            hooked: the module being entered; to save time, the stack is only searched if it may begin a pass.
        """
        first, frame = self._first, sys._getframe()
        if not self._gathered or self._caller is None or first is None:
            return False
        if hooked is not None and hooked is not first and id(hooked.module) in first.inside:
            return False
        while frame is not self._caller:
            if frame.f_back is None:
                return True
            frame = frame.f_back
        return False

    @outside_transforms
    def enter(self, hooked: HookedModule) -> None:
        """Gather the units of `hooked`, and prefetch the next ones of this pass."""
        self._gathered.append(list(hooked.units))
        here = hooked.position
        if here is None:
            return
        if here not in self.seen:
            self.seen.append(here)
        with ledger.phase("forward"):
            for unit in hooked.units:
                self._prefetcher.gather(unit)
            subtree = self._first.subtree if self._first is not None else ()
            self._prefetcher.prefetch(position for position in subtree if position > here)

    @outside_transforms
    def read(self, unit: Unit) -> None:
        """Gather a unit of another module that the innermost module reads."""
        with ledger.phase("forward"):
            self._prefetcher.gather(unit)
        self._gathered[-1].append(unit)

    def leave(self, hooked: HookedModule, lent: Sequence[Unit] = ()) -> Sequence[Unit]:
        """Release units that no enclosing module uses and the gather plan does not keep. Returns the units it had read.

        Args:
            lent: units whose parameters, or views of them, are in the output: the enclosing module reads them from now
                on; without one, they stay gathered.
        """
        units = self._gathered.pop()
        if self._gathered:
            self._gathered[-1] += lent
        for unit in units:
            is_lent = unit in lent
            if not any(unit in others for others in self._gathered) and (is_lent or not self._keeps(hooked, unit)):
                if is_lent:
                    unit.leave_views()
                unit.release()
        return units

    def _keeps(self, hooked: HookedModule, unit: Unit) -> bool:
        if unit not in hooked.units:
            return False  # read by a hooked module that it does not belong to
        plan = self._order.gather_plan
        return hooked.position in (plan.kept_for_backward if self.trains else plan.kept_for_inference)

    @outside_transforms
    def end(self) -> None:
        """End a pass, when the first entered module has been left. Collective."""
        self._caller = None
        self._prefetcher.end_pass(in_backward=False)
        self.is_out_of_order = self.is_out_of_order or self.seen != sorted(self.seen)

    def abandon(self) -> None:
        """Forget running modules, because their ends will not be seen."""
        self._gathered.clear()
        self._caller = None

    def forget_order(self) -> None:
        """Reset after a change of the execution order."""
        self.seen = []
        self.is_out_of_order = False


@dataclass(slots=True)
class _Descent:
    """Progress of a backward."""

    cursor: int  # backward is done with all positions from here on
    entered: set[int] = field(default_factory=set)  # positions that backward has reached
    holders: dict[Unit, HookedModule] = field(default_factory=dict)  # the module that a unit is gathered for
    reached: HookedModule | None = None  # the module reached last, whose backward is not over

    def enter(self, position: int) -> None:
        """Record that backward reaches `position`."""
        if position in self.entered:  # again: the graph has several passes, and the next one begins
            self.cursor = position
            self.entered.clear()
        self.entered.add(position)
        self.cursor = min(self.cursor, position)


class Backward:
    """The current backward pass, if any.

    Attributes:
        num_passes: number of forward passes that backward may traverse.
    """

    def __init__(
        self, order: ExecutionOrder, prefetcher: Prefetcher, on_progress: Callable[[int | None], None]
    ) -> None:
        """`on_progress`: called with the position from which on backward is done; None: it returns for another pass."""
        self._order = order
        self._prefetcher = prefetcher
        self._on_progress = on_progress
        self._descent: _Descent | None = None
        self._held: list[Unit] = []
        self.num_passes = 0

    @property
    def is_under_way(self) -> bool:
        return self._descent is not None

    def reach(self, hooked: HookedModule, units: Sequence[Unit], *, creates_graph: bool = False) -> None:
        """Gather `units` for the backward of `hooked`, because the gradient of one of its outputs has arrived.

        If backward creates a graph (for a gradient penalty), the double backward reads the units too, in operations
        without hooks: they are held until the backward of the loss.
        """
        if self._descent is not None:
            self._descent.reached = None
        self.gather(hooked, units)
        if creates_graph:
            self._held += units
            for unit in units:
                unit.is_held = True
        assert self._descent is not None, "it has begun"
        self._descent.reached = hooked

    @outside_transforms
    def gather(self, hooked: HookedModule | None, units: Sequence[Unit]) -> None:
        """Gather `units` for `hooked`, which backward has reached or recomputes, and prefetch the next ones. None: for
        a read outside of hooked modules."""
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
                holder = descent.holders.get(unit)
                if hooked is not None and (holder is None or id(hooked.module) not in holder.inside):
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
        """Release units gathered for modules that do not enclose `hooked`, because backward has reached `hooked`.

        If `hooked` only recomputes its forward, for a checkpoint around several modules, the module that backward has
        reached still needs its units.
        """
        for unit, holder in list(descent.holders.items()):
            if holder is descent.reached:
                continue
            # A container may return an intermediate result, while a module in it is still in use.
            apart = id(hooked.module) not in holder.inside and id(holder.module) not in hooked.inside
            if holder is not hooked and apart:
                del descent.holders[unit]
                unit.release()

    def lend(self, units: Sequence[Unit]) -> None:
        """Keep units whose parameters a recomputed forward returned, until the end of backward."""
        if self._descent is not None:
            for unit in units:
                self._descent.holders.pop(unit, None)

    def stop_holding(self) -> None:
        """Allow the release of units held for a double backward."""
        for unit in self._held:
            unit.is_held = False
        self._held = []

    @outside_transforms
    def end(self) -> bool:
        """End backward. Returns whether one was running; collective if so."""
        was_under_way = self.is_under_way
        self._descent, self._prefetcher.in_backward, self.num_passes = None, False, 0
        if was_under_way:
            self._prefetcher.end_pass(in_backward=True)
        return was_under_way


class ParameterCoordinator:
    """Gathers and releases units; see the module docstring.

    Attributes:
        prefetcher: gathers units and synchronises with other ranks.
        forward, backward: the current pass in each direction.
    """

    def __init__(
        self,
        order: ExecutionOrder,
        prefetcher: Prefetcher,
        edits: ShardedEdits,
        on_progress: Callable[[int | None], None],
    ) -> None:
        """
        Args:
            edits: checks units that inference keeps gathered before they are released.
            on_progress: called with the position from which on backward is done; None: it returns for another pass.
        """
        self._order = order
        self._edits = edits
        self.prefetcher = prefetcher
        self.forward = Forward(order, prefetcher)
        self.backward = Backward(order, prefetcher, on_progress)
        self._handles: list[Any] | None = None

    def reorder(self, order: Sequence[int]) -> None:
        """Move the hooked module at `order[i]` to position `i`. Only between passes."""
        assert not self.forward.is_running and not self.backward.is_under_way, "a pass is running"
        self._order.change(order)
        self.forward.forget_order()

    # Hooks

    @property
    def is_watching(self) -> bool:
        return self._handles is not None

    def watch(self) -> None:
        """Register the hooks. They are excluded from compiled code, whose graph breaks at every unit."""
        assert self._handles is None, "already watching"
        self._handles = []
        for hooked in self._order.hooked_modules:
            enter = uncompiled(functools.partial(self._enter, hooked))
            leave = uncompiled(functools.partial(self._leave, hooked))
            self._handles.append(hooked.module.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(hooked.module.register_forward_hook(leave, always_call=True))

    def unwatch(self) -> None:
        """Remove the hooks and release everything; `watch` restores them."""
        for handle in self._handles or ():
            handle.remove()
        self._handles = None
        self.forward.abandon()
        self.end_backward()
        self.prefetcher.discard_prefetched()
        self.release_all()

    @property
    def is_running(self) -> bool:
        """Whether a hooked forward or a backward is running, so that a read may gather."""
        return self.forward.is_running or _in_autograd()

    def _enter(self, hooked: HookedModule, _module: nn.Module, _args: Any) -> None:
        hooked.entered.append(_next_node())
        if _in_autograd():
            self.backward.gather(hooked, hooked.units)  # recomputation of a checkpointed forward
            return
        self._forget_interrupted(hooked)
        if not self.forward.is_running:
            self._begin_forward(hooked)
        self.forward.enter(hooked)

    def _leave(self, hooked: HookedModule, _module: nn.Module, _args: Any, output: Any) -> None:
        since = hooked.entered.pop()
        tensors = _tensors(output)
        if _in_autograd():
            self.backward.lend(_shown_in(tensors, hooked.units))
            self._watch_outputs(hooked, hooked.units, tensors, since)
            return
        units = self.forward.leave(hooked, _shown_in(tensors, self.forward.innermost))
        self._watch_outputs(hooked, units, tensors, since)
        if not self.forward.is_running:
            self.forward.end()
            if not self.forward.trains:
                self._edits.remember_kept()

    def _watch_outputs(
        self, hooked: HookedModule, units: Sequence[Unit], tensors: Sequence[Tensor], since: int
    ) -> None:
        """Hook outputs computed here since autograd node `since`, to gather again when backward reaches them. Outputs
        that were only passed through belong to an earlier hooked module."""
        if not (units and torch.is_grad_enabled() and hooked.reads_in_backward):
            return
        needed = tuple(units)

        def reach(_gradient: Tensor) -> None:
            self.backward.reach(hooked, needed, creates_graph=torch.is_grad_enabled())

        for tensor in tensors:
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since:
                tensor.register_hook(reach)

    def read(self, unit: Unit) -> None:
        """Gather a unit for the innermost module, which reads a parameter of another module."""
        if unit.is_gathered:
            return
        if _in_autograd():
            self.backward.gather(None, (unit,))
        elif self.forward.is_running:
            self.forward.read(unit)

    # Between passes

    def _forget_interrupted(self, entered: HookedModule | None = None) -> None:
        """Release the units of an interrupted forward, which would otherwise keep their values through updates."""
        if self.forward.is_running and self.forward.is_interrupted(entered):
            self.forward.abandon()
            self.prefetcher.discard_prefetched()
            self.release_all()

    @outside_transforms
    def _begin_forward(self, hooked: HookedModule) -> None:
        if self.backward.is_under_way:
            self.backward.end()
            self.release_all()
        trains = torch.is_grad_enabled()
        if not trains:
            self.prefetcher.discard_prefetched()  # it was prefetched for a training pass
        if trains and not self.forward.trains:
            self._edits.give_up_kept()
            self.release_all()
        self.prefetcher.rows.are_written()  # the program may have written to shards between passes
        self.forward.begin(hooked, trains=trains)
        self.backward.num_passes += trains

    def end_backward(self) -> None:
        """End the backward pass, if any, and release its units. Collective."""
        self.backward.stop_holding()
        if self.backward.end():
            self.release_all()

    def end_passes(self) -> None:
        """End running passes and release their units. Collective if a backward is running."""
        self._forget_interrupted()
        self.end_backward()
        self.release_all()

    def prepare_update(self, facts: Sequence[int] = ()) -> Sequence[Sequence[int]]:
        """End passes before weights change. Collective: returns all ranks' `facts` once all ranks have called it."""
        self.end_passes()
        self.prefetcher.discard_prefetched()
        return self.prefetcher.begin_update(facts)

    def release_all(self) -> None:
        """Release all units except persistent ones and those that a running forward uses."""
        self.prefetcher.release_all(except_for=self.forward.in_use)


def _caller_of_hooks() -> FrameType | None:
    """The frame that called the running hook: a module's call, or compiled code."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not HOOK:
        frame = frame.f_back
    return frame.f_back if frame is not None else None


def _next_node() -> int:
    """The sequence number of autograd's next operation; numbers increase."""
    return torch._C._autograd._get_sequence_nr()


def _in_autograd() -> bool:
    """Whether this code runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _tensors(value: Any, depth: int = _DEEPEST, seen: set[int] | None = None) -> list[Tensor]:
    """The tensors of a module's output: in containers, and in attributes of objects down to this depth."""
    if isinstance(value, Tensor):
        return [value]
    tensors, seen = [], set() if seen is None else seen
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif depth and leaf is not None and not isinstance(leaf, _WITHOUT_TENSORS) and id(leaf) not in seen:
            seen.add(id(leaf))
            tensors.extend(_tensors(_parts(leaf), depth - 1, seen))
    return tensors


def _parts(thing: Any) -> list[Any]:
    """The parts of an object that `tree_leaves` does not know: attributes, and items of container subclasses."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(thing).__mro__]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own)]
    parts = [getattr(thing, name, None) for name in names if name not in ("__dict__", "__weakref__")]
    parts += getattr(thing, "__dict__", {}).values()
    if isinstance(thing, (list, tuple, set, frozenset)):
        parts += thing
    return [*parts, *thing.values()] if isinstance(thing, dict) else parts


def _shown_in(tensors: Sequence[Tensor], units: Sequence[Unit]) -> list[Unit]:
    """Units whose gathered parameters, or views of them, are among these tensors."""
    if not units:
        return []
    addresses = {
        tensor.untyped_storage().data_ptr()
        for tensor in tensors
        if tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    }
    return [unit for unit in units if unit.is_gathered and not addresses.isdisjoint(unit.addresses())]
