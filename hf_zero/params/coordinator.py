"""Owns when units are gathered and released: hooks around forward, and on what it returns for backward.

    forward     enter 0 | gather 0, ask for 1 | compute | enter 1 | ...                         ascending
    backward    output of 1 needs a gradient | gather 1, ask for 0 | compute | ...              descending

Ranks need not run in step inside and between units: each rank gathers what it needs when it needs
it, and `hf_zero.comm.negotiation` brings the ranks together. A unit that is entered again within one pass (a layer used
twice, a tied head) is gathered again unless it is still there. The end of a pass is met by all ranks, so that nobody
leaves while others still need its shards.

At first the order in which units are expected is the one in which modules were registered. Where forward turns out to
take another, the ranks agree on that at the step (`reorder`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_zero.comm import ledger, uncompiled
from hf_zero.params.edits import ShardedEdits
from hf_zero.params.hooked_modules import ExecutionOrder, HookedModule
from hf_zero.params.prefetcher import Prefetcher
from hf_zero.params.unit import Unit

_DEEPEST = 4  # of objects in objects that a module returns


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
        self._gathered: list[list[Unit]] = []  # of each: its own units, and those that it reads of other modules
        self._subtree: tuple[int, ...] = ()
        self.trains = False
        self.seen: list[int] = []
        self.is_out_of_order = False

    @property
    def is_running(self) -> bool:
        return bool(self._gathered)

    @property
    def innermost(self) -> Sequence[Unit]:
        """What the forward that has begun last uses."""
        return self._gathered[-1]

    @property
    def in_use(self) -> set[Unit]:
        return {unit for units in self._gathered for unit in units}

    def begin(self, hooked: HookedModule, *, trains: bool) -> None:
        """Begin a pass: `hooked` is entered first."""
        self.trains = self._prefetcher.trains = trains
        self._subtree = hooked.subtree
        self.seen = []

    def enter(self, hooked: HookedModule) -> None:
        """Gather what `hooked` has, and ask for what comes after it in this pass."""
        self._gathered.append(list(hooked.units))
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
        self._gathered[-1].append(unit)

    def leave(self, hooked: HookedModule, lent: Sequence[Unit] = ()) -> Sequence[Unit]:
        """Release what no enclosing module uses and the gather plan does not keep. Returns what `hooked` has read.

        Args:
            lent: of which parameters, or views of them, are returned: the module around reads them from now on, and
                where there is none, they stay as they are.
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

    def end(self) -> None:
        """End a pass: the first module that was entered has been left. Collective."""
        self._prefetcher.end_pass(in_backward=False)
        self.is_out_of_order = self.is_out_of_order or self.seen != sorted(self.seen)

    def abandon(self) -> None:
        """Forget running modules: their ends will not be seen."""
        self._gathered.clear()

    def forget_order(self) -> None:
        """The execution order is another one now."""
        self.seen = []
        self.is_out_of_order = False


@dataclass(slots=True)
class _Descent:
    """Progress of a backward."""

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
        self._held: list[Unit] = []
        self.num_passes = 0

    @property
    def is_under_way(self) -> bool:
        return self._descent is not None

    def reach(self, hooked: HookedModule, units: Sequence[Unit], *, creates_graph: bool = False) -> None:
        """The gradient of an output of `hooked` has come; its backward reads `units`.

        Where it creates a graph (of a gradient penalty), so does the backward of that backward, at operations that no
        hook is at: they are held until the loss has had its backward.
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

    def gather(self, hooked: HookedModule | None, units: Sequence[Unit]) -> None:
        """Gather `units` for `hooked`, which backward has come to or whose forward it runs again, and ask for what
        comes after it. None: read elsewhere."""
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

    def lend(self, units: Sequence[Unit]) -> None:
        """Parameters of these have been returned by a forward that runs again: keep them to the end."""
        if self._descent is not None:
            for unit in units:
                self._descent.holders.pop(unit, None)

    def stop_holding(self) -> None:
        """What is held for the backward of a backward may be released."""
        for unit in self._held:
            unit.is_held = False
        self._held = []

    def end(self) -> bool:
        """Backward is over, where it was under way, which is returned. Collective then."""
        was_under_way = self.is_under_way
        self._descent, self._prefetcher.in_backward, self.num_passes = None, False, 0
        if was_under_way:
            self._prefetcher.end_pass(in_backward=True)
        return was_under_way


class ParameterCoordinator:
    """Gathers and releases units; the module's docstring has the rules.

    Attributes:
        prefetcher: gathers, and meets the other ranks.
        forward, backward: the pass under way in each direction.
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
            edits: has to look at what inference keeps gathered before that is released.
            on_progress: told from which position on backward is done; None: it will come back for another pass.
        """
        self._order = order
        self._edits = edits
        self.prefetcher = prefetcher
        self.forward = Forward(order, prefetcher)
        self.backward = Backward(order, prefetcher, on_progress)
        self._handles: list[Any] | None = None

    def reorder(self, order: Sequence[int]) -> None:
        """From now on position `i` is the hooked module that was at `order[i]`. Between passes only."""
        assert not self.forward.is_running and not self.backward.is_under_way, "a pass is under way"
        self._order.change(order)
        self.forward.forget_order()

    # Hooks

    @property
    def is_watching(self) -> bool:
        return self._handles is not None

    def watch(self) -> None:
        """Register the hooks. They stay out of compiled code, where a graph breaks at every unit."""
        assert self._handles is None, "already watching"
        self._handles = []
        for hooked in self._order.hooked_modules:
            enter = uncompiled(functools.partial(self._enter, hooked))
            leave = uncompiled(functools.partial(self._leave, hooked))
            self._handles.append(hooked.module.register_forward_pre_hook(enter, prepend=True))
            self._handles.append(hooked.module.register_forward_hook(leave, always_call=True))

    def unwatch(self) -> None:
        """Take the hooks away and release everything; `watch` brings them back."""
        for handle in self._handles or ():
            handle.remove()
        self._handles = None
        self.forward.abandon()
        self.end_backward()
        self.prefetcher.ahead.discard()
        self.release_all()

    @property
    def is_running(self) -> bool:
        """Whether a watched forward or a backward is under way, so that a read may gather."""
        return self.forward.is_running or _in_autograd()

    def _enter(self, hooked: HookedModule, _module: nn.Module, _args: Any) -> None:
        hooked.entered.append(_next_node())
        if _in_autograd():
            self.backward.gather(hooked, hooked.units)  # recomputation of a checkpointed forward
            return
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
        """Gather again when backward reaches what was computed here, since node `since`; outputs that were only passed
        through belong to an earlier hooked module, and their turn comes when this one's is long over."""
        if not (units and torch.is_grad_enabled() and hooked.reads_in_backward):
            return
        needed = tuple(units)

        def reach(_gradient: Tensor) -> None:
            self.backward.reach(hooked, needed, creates_graph=torch.is_grad_enabled())

        for tensor in tensors:
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since:
                tensor.register_hook(reach)

    def read(self, unit: Unit) -> None:
        """A module reads a parameter of a unit that is not gathered for it: gather it for the innermost one."""
        if unit.is_gathered:
            return
        if _in_autograd():
            self.backward.gather(None, (unit,))
        elif self.forward.is_running:
            self.forward.read(unit)

    # Between passes

    def _begin_forward(self, hooked: HookedModule) -> None:
        if self.backward.is_under_way:
            self.backward.end()
            self.release_all()
        trains = torch.is_grad_enabled()
        if not trains:
            self.prefetcher.ahead.discard()  # it was for a pass that trains
        if trains and not self.forward.trains:
            self._edits.give_up_kept()
            self.release_all()
        self.prefetcher.note_written()  # what the program has done between passes
        self.forward.begin(hooked, trains=trains)
        self.backward.num_passes += trains

    def end_backward(self) -> None:
        """The backward pass, if there was one, is over: nothing stays gathered. Collective."""
        self.backward.stop_holding()
        if self.backward.end():
            self.release_all()

    def end_passes(self) -> None:
        """End what is under way and go back to shards. Collective, where a backward is under way."""
        self.end_backward()
        self.release_all()

    def settle(self, facts: Sequence[int] = ()) -> Sequence[Sequence[int]]:
        """The same, before weights change. Collective: returns when all ranks have called it, with their `facts`."""
        self.end_passes()
        self.prefetcher.ahead.discard()
        return self.prefetcher.begin_update(facts)

    def release_all(self) -> None:
        """Back to shards, except persistent units and what a running forward uses."""
        self.prefetcher.release_all(except_for=self.forward.in_use)


def _next_node() -> int:
    """The number that autograd gives to the next operation; later operations have larger ones."""
    return torch._C._autograd._get_sequence_nr()


def _in_autograd() -> bool:
    """Whether this code runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _tensors(output: Any) -> list[Tensor]:
    """The tensors of a module's output; of an object that is no container, those among its attributes, and where none
    are there, those further inside."""
    tensors = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)):
            tensors.extend(value for value in vars(leaf).values() if isinstance(value, Tensor))
    return tensors or list(_inside(output, _DEEPEST))


def _inside(value: Any, depth: int) -> Iterator[Tensor]:
    """The tensors in containers, and in attributes of objects down to this depth."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and not isinstance(leaf, (nn.Module, type)):
            names = [name for kind in type(leaf).__mro__ for name in _as_tuple(vars(kind).get("__slots__", ()))]
            slots = [getattr(leaf, name, None) for name in names if name not in ("__dict__", "__weakref__")]
            yield from _inside([*slots, *getattr(leaf, "__dict__", {}).values()], depth - 1)


def _as_tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _shown_in(tensors: Sequence[Tensor], units: Sequence[Unit]) -> list[Unit]:
    """Units whose gathered parameters these tensors are, or views of."""
    if not units:
        return []
    addresses = {
        tensor.untyped_storage().data_ptr()
        for tensor in tensors
        if tensor.layout is torch.strided and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    }
    return [unit for unit in units if unit.is_gathered and not addresses.isdisjoint(unit.addresses())]
