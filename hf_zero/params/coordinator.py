"""Owns when units are gathered and released: hooks around forward, and on what it returns for backward.

What other ranks do inside and between units is no concern of this module: each rank gathers what it needs when it needs
it, and `hf_zero.comm.negotiation` brings the ranks together. A unit that is entered again within one pass (a layer used
twice, a tied head) is gathered again unless it is still there. The end of a pass is met by all ranks, so that nobody
leaves while others still need its shards.

At first the order in which units are expected is the one in which modules were registered. Where forward turns out to
take another, the ranks agree on that at the step (`reorder`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hf_zero.comm import uncompiled
from hf_zero.params.edits import ShardedEdits
from hf_zero.params.hooked_modules import ExecutionOrder, HookedModule
from hf_zero.params.passes import Backward, Forward
from hf_zero.params.prefetcher import Prefetcher
from hf_zero.params.unit import Unit


class ParameterCoordinator:
    """See the module's docstring for the rules.

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
        if _in_autograd():
            self._watch_outputs(hooked, hooked.units, output, since)
            return
        units = self.forward.leave(hooked)
        self._watch_outputs(hooked, units, output, since)
        if not self.forward.is_running:
            self.forward.end()
            if not self.forward.trains:
                self._edits.remember_kept()

    def _watch_outputs(self, hooked: HookedModule, units: Sequence[Unit], output: Any, since: int) -> None:
        """Gather again when backward reaches what was computed here, since node `since`; outputs that were only passed
        through belong to an earlier hooked module, and their turn comes when this one's is long over."""
        if not (units and torch.is_grad_enabled() and hooked.reads_in_backward):
            return
        needed = tuple(units)
        for tensor in _tensors(output):
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since:
                tensor.register_hook(lambda _grad: self.backward.reach(hooked, needed))

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
            self.end_backward()
        trains = torch.is_grad_enabled()
        if trains and not self.forward.trains:
            self._edits.give_up_kept()
            self.release_all()
        self.prefetcher.note_written()  # whatever the program has done between passes
        self.forward.begin(hooked, trains=trains)
        self.backward.num_passes += trains

    def end_backward(self) -> None:
        """The backward pass, if there was one, is over: nothing stays gathered. Collective."""
        if self.backward.end():
            self.release_all()

    def end_passes(self) -> None:
        """End what is under way and go back to shards. Collective, where a backward is under way."""
        self.end_backward()
        self.release_all()

    def settle(self, facts: Sequence[int] = ()) -> Sequence[Sequence[int]]:
        """The same, before weights change. Collective: all ranks have come to this when it returns their `facts`."""
        self.end_passes()
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
    """The tensors of a module's output; of an object that is no container, those among its attributes."""
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (nn.Module, type)):
            found.extend(value for value in vars(leaf).values() if isinstance(value, Tensor))
    return found
