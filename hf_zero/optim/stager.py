"""Fetches the inputs of an update, sub-group by sub-group, and writes results back.

    time ->     sub-group 0     fetch | update | write back
                sub-group 1             fetch  | update | write back
                sub-group 2                      fetch  | update | write back

With `StateStager` everything is already in memory. With an `OffloadStager` masters, states and gradients are vectors in
some storage; while these are offloaded, the optimizer's tensors show NaN in their true shape and take no memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_zero.device.runtime import Memory
from hf_zero.offload.placement import Placement
from hf_zero.offload.sub_group import StoredSubGroup, SubGroup
from hf_zero.offload.vector import Store, Vector, absent, at_hand_or_absent, empty_in, is_absent

# Storage of a tensor's states: one value per element, a separate storage format, or a count.
#
# Stagers and drives store states in their storage format. Checkpoints, fragments and other readers of elements use
# `values` and `store`.


# States with one value per parameter in torch's optimizers, for any shape of the parameter.
COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})


def is_per_element(name: str, value: Any, parameter: Tensor) -> bool:
    """Whether a state holds one value per element of its parameter."""
    return (
        isinstance(value, Tensor)
        and name not in COUNTERS
        and value.numel() == parameter.numel()
        and (value.dim() > 0 or parameter.dim() == 0)
    )


class StateForm(ABC):
    """The storage format of one state of a flat tensor. All bytes 0 must mean all elements 0.

    Attributes:
        dtype: dtype of the stored tensor, which is 1-D.
    """

    dtype: torch.dtype

    @abstractmethod
    def stored_numel(self, numel: int) -> int:
        """Length of the stored tensor for `numel` elements."""

    @abstractmethod
    def values(self, stored: Tensor, numel: int) -> Tensor:
        """The elements as a new tensor, fp32, 1-D."""

    @abstractmethod
    def store(self, values: Tensor) -> Tensor:
        """The stored tensor of 1-D `values`; the exact inverse of the method `values`."""

    def zeros(self, numel: int, device: torch.device) -> Tensor:
        return torch.zeros(self.stored_numel(numel), dtype=self.dtype, device=device)


Work = Callable[[SubGroup], None]
WritesAll = Callable[[SubGroup], bool]


class StateStager:
    """A stager for states that are always in the update's memory.

    Attributes:
        finish_update: called before masters and states are read or written outside an update.
    """

    def __init__(self, sub_groups: Sequence[SubGroup]) -> None:
        self.sub_groups = tuple(sub_groups)
        self.finish_update: Callable[[], None] = lambda: None

    def each(
        self, sub_groups: Sequence[SubGroup], work: Work, *, writes_all: WritesAll | None = None
    ) -> Iterator[SubGroup]:
        """Run `work` for one sub-group after the other; yields each when its new weights are in place.

        `writes_all`: whether the work overwrites every weight of a sub-group, so that old weights need not be fetched.
        """
        for sub_group in sub_groups:
            work(sub_group)
            yield sub_group

    def batches(self, sub_groups: Sequence[SubGroup]) -> Iterator[Sequence[SubGroup]]:
        """Yield batches of sub-groups whose masters, states and gradients are in memory until the next iteration."""
        yield sub_groups

    def copy_to_lp(self, sub_group: SubGroup) -> None:
        """Round the masters of a sub-group that is in memory into its weights."""
        if sub_group.lp_param is not None:
            sub_group.lp_param.copy_(sub_group.master)

    @contextmanager
    def opened(self, sub_group: SubGroup, *, changes: bool = False) -> Iterator[None]:
        """Context with master and states of one sub-group in memory, outside an update."""
        self.finish_update()
        yield

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Context to read masters and states of all sub-groups. Values stay valid until the next change."""
        self.finish_update()
        yield

    @property
    def always_at_hand(self) -> bool:
        """Whether masters and states are always in memory."""
        return True

    @property
    def rests_in_memory(self) -> bool:
        """Whether masters and states are in memory between updates, of the device or the host."""
        return True

    def forget_states(self, sub_group: SubGroup) -> None:  # noqa: B027
        """Called when the optimizer has dropped its states for this sub-group."""

    def move(self, sub_group: SubGroup, placement: Placement) -> None:
        """Move masters and states between updates to the memory of `placement`, which always has them at hand. Only
        what is offloaded can move."""
        raise NotImplementedError

    def flush(self) -> None:
        """Wait until everything has been written back."""
        self.finish_update()


class OffloadStager(StateStager):
    """A stager that fetches vectors for an update and releases them afterwards."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sub_groups: Sequence[SubGroup],
        gradient: Callable[[SubGroup], Vector],
        *,
        reads_ahead: bool = True,
        writes_behind: bool = True,
    ) -> None:
        """`gradient`: returns the vector of a sub-group's reduced gradient, which steps may replace."""
        super().__init__(sub_groups)
        self._optimizer = optimizer
        self._gradient = gradient
        self._reads_ahead = reads_ahead
        self._writes_behind = writes_behind
        self._shown: dict[SubGroup, dict[tuple[int, str], Tensor]] = {}  # what stands for states that are elsewhere

    def reserve(
        self,
        sub_group: SubGroup,
        names: Sequence[str],
        dtype: torch.dtype | None,
        form_of: Callable[[str], StateForm | None],
    ) -> None:
        """Reserve storage for states that the optimizer is known to have: zeros, in the storage format of `form_of`;
        None: one value per element."""
        stored = _stored(sub_group)
        if stored.states is None:
            return
        for position, tensor in enumerate(sub_group.tensors):
            for name in names:
                numel, kind, form = tensor.parameter.numel(), dtype or tensor.parameter.dtype, form_of(name)
                if form is not None:
                    numel, kind = form.stored_numel(numel), form.dtype
                stored.vectors[position, name] = stored.states.keep(f"{name} of {sub_group}", numel, kind, zeros=True)
                stored.reserved.add((position, name))

    # Walking

    def each(
        self, sub_groups: Sequence[SubGroup], work: Work, *, writes_all: WritesAll | None = None
    ) -> Iterator[SubGroup]:
        def fetch(sub_group: SubGroup) -> None:
            self._fetch(sub_group)
            lp_param = _stored(sub_group).lp_param
            if lp_param is not None:
                lp_param.fetch(reads=writes_all is None or not (lp_param.is_whole and writes_all(sub_group)))

        for sub_group in self._walk(sub_groups, fetch):
            lp_param = _stored(sub_group).lp_param
            if lp_param is None:
                work(sub_group)
            else:
                with _pointing(sub_group.lp_param, lp_param.take()):
                    work(sub_group)
                # After an update on the host, the in lane copies weights to the device during the next update;
                # the compute stream waits for them before it gathers them.
                lp_param.release(changed=True)
                lp_param.join()
            self._leave(sub_group)
            yield sub_group
        self._end_walk(sub_groups)

    def batches(self, sub_groups: Sequence[SubGroup]) -> Iterator[Sequence[SubGroup]]:
        if self.always_at_hand and all(self._gradient(sub_group).tensor is not None for sub_group in sub_groups):
            yield sub_groups
            return
        for sub_group in self._walk(sub_groups, self._fetch):
            yield [sub_group]
            self._leave(sub_group)
        self._end_walk(sub_groups)

    @staticmethod
    def _end_walk(sub_groups: Sequence[SubGroup]) -> None:
        """Flush weights that were updated on the device and are stored on the host, where they may now be read. Masters
        and states go on leaving: only their own vectors read them."""
        for sub_group in sub_groups:
            lp_param = _stored(sub_group).lp_param
            if lp_param is not None and lp_param.leaves_late:
                lp_param.flush()

    def _walk(self, sub_groups: Sequence[SubGroup], fetch: Work) -> Iterator[SubGroup]:
        """Yield each sub-group with everything in memory, while the next is fetched. The caller releases it."""
        for position, sub_group in enumerate(sub_groups):
            if position == 0 or not self._reads_ahead:
                fetch(sub_group)
            if self._reads_ahead and position + 1 < len(sub_groups):
                fetch(sub_groups[position + 1])
            self._point(sub_group, lambda vector: vector.take())
            yield sub_group
            if not self._writes_behind:
                _flush(sub_group)

    def copy_to_lp(self, sub_group: SubGroup) -> None:
        lp_param = _stored(sub_group).lp_param
        if lp_param is not None:
            with lp_param.opened(reads=not lp_param.is_whole, changes=True) as target:
                target.copy_(sub_group.master)

    @contextmanager
    def opened(self, sub_group: SubGroup, *, changes: bool = False) -> Iterator[None]:
        self.finish_update()
        stored = _stored(sub_group)
        self._adopt_written(sub_group)
        with ExitStack() as stack:
            if stored.lp_param is not None:
                values = stack.enter_context(stored.lp_param.opened(changes=changes))
                stack.enter_context(_pointing(sub_group.lp_param, values))
            for vector in stored.kept:
                vector.fetch()
            self._point(sub_group, lambda vector: vector.take(), begins=False)
            try:
                yield
            finally:
                self._store_and_release(sub_group, changed=changes)

    @contextmanager
    def viewing(self) -> Iterator[None]:
        self.flush()
        for sub_group in self.sub_groups:
            self._point(sub_group, lambda vector: vector.view(), begins=False)
        try:
            yield
        finally:
            for sub_group in self.sub_groups:
                self._put_away(sub_group)

    @property
    def always_at_hand(self) -> bool:
        return all(vector.tensor is not None for sub_group in self.sub_groups for vector in _stored(sub_group).kept)

    @property
    def rests_in_memory(self) -> bool:
        return all(vector.resting is not None for sub_group in self.sub_groups for vector in _stored(sub_group).kept)

    def forget_states(self, sub_group: SubGroup) -> None:
        stored = _stored(sub_group)
        for place in [place for place in stored.vectors if place not in stored.reserved]:
            stored.vectors.pop(place).free()

    def flush(self) -> None:
        self.finish_update()
        for sub_group in self.sub_groups:
            self._adopt_written(sub_group)
            _flush(sub_group)

    def move(self, sub_group: SubGroup, placement: Placement) -> None:
        stored, memory = _stored(sub_group), placement.work
        states, lp_param = self._optimizer.state, placement.weights(stored.weights)
        with self.opened(sub_group):
            master = lp_param
            if placement.keeps_masters(lp_param, stored.master.dtype):
                master = placement.masters.keep(f"master weights of {sub_group}", lp_param.numel, stored.master.dtype)
                master.take().copy_(sub_group.master)
            moved = [moved_to(memory, states.get(tensor.parameter, {})) for tensor in sub_group.tensors]
        _flush(sub_group)
        for vector in stored.kept if stored.lp_param is not None else stored.vectors.values():
            vector.free()
        stored.vectors.clear()
        stored.reserved.clear()
        stored.master, stored.lp_param, stored.states = master, None if master is lp_param else lp_param, None
        sub_group.master = at_hand_or_absent(master)
        sub_group.lp_param = None if stored.lp_param is None else at_hand_or_absent(stored.lp_param)
        self._shown.pop(sub_group, None)
        for tensor, state in zip(sub_group.tensors, moved, strict=True):
            part = sub_group.master.narrow(0, tensor.interval.start, tensor.interval.numel)
            tensor.parameter.data = part.view(tensor.parameter.shape)
            if state:
                states[tensor.parameter].update(state)

    # One sub-group

    def _fetch(self, sub_group: SubGroup) -> None:
        self._gradient(sub_group).fetch()
        self._drop_removed(sub_group)
        self._adopt_written(sub_group)
        for vector in _stored(sub_group).kept:
            vector.fetch()

    def _drop_removed(self, sub_group: SubGroup) -> None:
        """Drop vectors whose states a program has removed, so that the optimizer creates them as at its first step."""
        stored = _stored(sub_group)
        for position, name in [place for place in stored.vectors if place not in stored.reserved]:
            if name not in self._optimizer.state.get(sub_group.tensors[position].parameter, {}):
                stored.vectors.pop((position, name)).free()

    def _adopt_written(self, sub_group: SubGroup) -> None:
        """Store what a program has written into states that are elsewhere: another tensor, or a constant, which torch
        fills into a tensor without memory, too."""
        stored = _stored(sub_group)
        for (position, name), shown in self._shown.get(sub_group, {}).items():
            state = self._optimizer.state.get(sub_group.tensors[position].parameter, {})
            vector = stored.vectors.get((position, name))
            if vector is None or name not in state or (state[name] is shown and is_absent(shown)):
                continue
            with vector.opened(reads=False, changes=True) as tensor:
                tensor.copy_(state[name].reshape(-1))
            state[name] = absent(vector.numel, vector.dtype).view(shown.shape)
            self._shown[sub_group][position, name] = state[name]

    def _leave(self, sub_group: SubGroup) -> None:
        self._store_and_release(sub_group, changed=True)
        self._gradient(sub_group).release(changed=False)

    def _point(self, sub_group: SubGroup, values: Callable[[Vector], Tensor], *, begins: bool = True) -> None:
        """Point the optimizer's tensors to the result of `values`. With `begins`, also create states that do not exist
        (zeros), and skip masters that the update does not need."""
        stored = _stored(sub_group)
        if stored.master.tensor is None and not (begins and stored.master.rest):
            _show_master(sub_group, values(stored.master))
        for (position, name), vector in stored.vectors.items():
            parameter = sub_group.tensors[position].parameter
            is_known = name in self._optimizer.state.get(parameter, {})
            if (is_known and vector.tensor is None) or (begins and not is_known):
                tensor = values(vector)
                if not is_known:
                    tensor.zero_()  # a program may have removed the state
                is_form = tensor.numel() != parameter.numel()
                self._shown.get(sub_group, {}).pop((position, name), None)
                self._optimizer.state[parameter][name] = tensor if is_form else tensor.view(parameter.shape)

    def _store_and_release(self, sub_group: SubGroup, *, changed: bool) -> None:
        """Store states that were created or replaced since the fetch, and release."""
        stored = _stored(sub_group)
        fetched = stored.kept
        if stored.states is not None:
            self._keep_states(sub_group, stored, stored.states)
        kept = set(map(id, stored.kept))
        for vector in fetched:
            vector.release(changed=changed)
            if id(vector) not in kept:
                vector.free()
        self._put_away(sub_group)

    def _keep_states(self, sub_group: SubGroup, stored: StoredSubGroup, store: Store) -> None:
        for position, tensor in enumerate(sub_group.tensors):
            for name, value in self._optimizer.state.get(tensor.parameter, {}).items():
                is_kept = (position, name) in stored.reserved or is_per_element(name, value, tensor.parameter)
                if not is_kept:
                    continue
                known = stored.vectors.get((position, name))
                if known is None or known.dtype != value.dtype:
                    stored.vectors[position, name] = store.adopt(f"{name} of {sub_group}", value.reshape(-1))
                elif known.take().data_ptr() != value.data_ptr():
                    known.take().copy_(value.reshape(-1))

    def _put_away(self, sub_group: SubGroup) -> None:
        stored = _stored(sub_group)
        if stored.master.tensor is None:
            _show_master(sub_group, absent(sub_group.part.numel, sub_group.master.dtype))
        for (position, name), vector in stored.vectors.items():
            state = self._optimizer.state.get(sub_group.tensors[position].parameter, {})
            if vector.tensor is None and name in state:
                state[name] = absent(vector.numel, vector.dtype).view(state[name].shape)
                self._shown.setdefault(sub_group, {})[position, name] = state[name]


def moved_to(memory: Memory, state: Any) -> Any:
    """A copy of an optimizer's state with its tensors in `memory`, except single values, such as counts of updates,
    which the host reads."""
    if isinstance(state, Mapping):
        return {key: moved_to(memory, value) for key, value in state.items()}
    if not isinstance(state, Tensor) or not state.dim():
        return state
    return empty_in(memory, state.numel(), state.dtype).view(state.shape).copy_(state)


def _stored(sub_group: SubGroup) -> StoredSubGroup:
    assert sub_group.stored is not None, "offloaded sub-groups are stored"
    return sub_group.stored


def _everything(stored: StoredSubGroup) -> list[Vector]:
    return [*stored.kept, *([stored.lp_param] if stored.lp_param is not None else [])]


def _flush(sub_group: SubGroup) -> None:
    for vector in _everything(_stored(sub_group)):
        vector.flush()


def _show_master(sub_group: SubGroup, values: Tensor) -> None:
    sub_group.master.data = values
    for tensor in sub_group.tensors:
        part = values.narrow(0, tensor.interval.start, tensor.interval.numel)
        tensor.parameter.data = part.view(tensor.parameter.shape)


@contextmanager
def _pointing(tensor: Tensor | None, values: Tensor) -> Iterator[None]:
    """Context in which `tensor` points to `values`."""
    assert tensor is not None
    before = tensor.data
    tensor.data = values
    try:
        yield
    finally:
        tensor.data = before
