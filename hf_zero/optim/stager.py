"""Brings what an update works on to where it runs, sub-group by sub-group, and takes it back.

    time ->     shard 0     fetch | update | write back
                shard 1             fetch  | update | write back
                shard 2                      fetch  | update | write back

`StateStager` is the case in which everything is at hand already. With an `OffloadStager` masters, states and gradients
are vectors in some place; while they are away, the optimizer's tensors show NaN in their true shape and take no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.offload.store import Store
from hf_zero.offload.vector import Vector, absent
from hf_zero.optim.sub_group import SubGroup

WritesAll = Callable[[int], bool]
COUNTERS = ("step",)


class StateStager:
    """Everything is where updates run."""

    def __init__(self, sub_groups: Sequence[SubGroup]) -> None:
        self.sub_groups = tuple(sub_groups)

    def each(
        self, indices: Sequence[int], work: Callable[[int], None], *, writes_all: WritesAll | None = None
    ) -> Iterator[int]:
        """Do `work` for one sub-group after the other; yields each index when its new weights are where they belong.

        `writes_all` says whether the work rounds every weight of a sub-group, so that the old ones need not be fetched.
        """
        for index in indices:
            work(index)
            yield index

    def batches(self, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        """Shards whose masters, states and gradients are in place together, until the next ones are asked for."""
        yield indices

    def copy_to_lp(self, index: int) -> None:
        """Round a sub-group that is in place to where its weights belong."""
        sub_group = self.sub_groups[index]
        if sub_group.lp_param is not None:
            sub_group.lp_param.copy_(sub_group.master)

    @contextmanager
    def opened(self, index: int, *, changes: bool = False) -> Iterator[None]:
        """Master and states of one sub-group in place, outside an update."""
        yield

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Masters and states of all sub-groups can be read. What was read stays right until the next change."""
        yield

    @property
    def always_at_hand(self) -> bool:
        """Whether masters and states can be used at any time."""
        return True

    def forget_states(self, index: int) -> None:  # noqa: B027
        """The optimizer has no states for this shard any more."""

    def flush(self) -> None:
        """Return when everything is where it belongs."""


@dataclass(frozen=True, slots=True)
class SubGroupVectors:
    """What belongs to one sub-group, as it is kept.

    Attributes:
        gradient: asks for the reduced gradient's vector, which may be made anew for every step.
        states: where the optimizer's states go; None: they stay where the optimizer makes them, beside the master.
    """

    master: Vector
    lp_param: Vector | None
    gradient: Callable[[], Vector]
    states: Store | None


class OffloadStager(StateStager):
    """Vectors are fetched for an update and released after it."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        sub_groups: Sequence[SubGroup],
        vectors: Sequence[SubGroupVectors],
        *,
        reads_ahead: bool = True,
        writes_behind: bool = True,
    ) -> None:
        super().__init__(sub_groups)
        self._optimizer = optimizer
        self._vectors = tuple(vectors)
        self._states: tuple[dict[tuple[int, str], Vector], ...] = tuple({} for _ in self.sub_groups)
        self._reserved: set[tuple[int, int, str]] = set()  # shard, tensor, name
        self._reads_ahead = reads_ahead
        self._writes_behind = writes_behind

    def reserve(self, index: int, names: Sequence[str], dtype: torch.dtype | None) -> None:
        """Make room for states that the optimizer is known to have: zeros, one per element."""
        store = self._vectors[index].states
        for position, tensor in enumerate(self.sub_groups[index].tensors if store is not None else ()):
            for name in names:
                assert store is not None
                dtype = dtype or tensor.parameter.dtype
                numel, label = tensor.parameter.numel(), self._name(index, name)
                self._states[index][position, name] = store.keep(label, numel, dtype, zeros=True)
                self._reserved.add((index, position, name))

    # Walking

    def each(
        self, indices: Sequence[int], work: Callable[[int], None], *, writes_all: WritesAll | None = None
    ) -> Iterator[int]:
        def fetch(index: int) -> None:
            self._fetch(index)
            lp_param = self._vectors[index].lp_param
            if lp_param is not None:
                lp_param.fetch(reads=writes_all is None or not (lp_param.is_whole and writes_all(index)))

        for index in self._walk(indices, fetch):
            sub_group, lp_param = self.sub_groups[index], self._vectors[index].lp_param
            if lp_param is None:
                work(index)
            else:
                with _pointing(sub_group.lp_param, lp_param.take()):
                    work(index)
                lp_param.release(changed=True)
            self._leave(index)
            yield index

    def batches(self, indices: Sequence[int]) -> Iterator[Sequence[int]]:
        if self.always_at_hand and all(self._vectors[index].gradient().tensor is not None for index in indices):
            yield indices
            return
        for index in self._walk(indices, self._fetch):
            yield [index]
            self._leave(index)

    def _walk(self, indices: Sequence[int], fetch: Callable[[int], None]) -> Iterator[int]:
        """Each shard with everything in place; the next one is on its way meanwhile. The caller leaves it."""
        for position, index in enumerate(indices):
            if position == 0 or not self._reads_ahead:
                fetch(index)
            if self._reads_ahead and position + 1 < len(indices):
                fetch(indices[position + 1])
            self._point(index, lambda vector: vector.take())
            yield index
            if not self._writes_behind:
                self._flush(index)

    def copy_to_lp(self, index: int) -> None:
        lp_param = self._vectors[index].lp_param
        if lp_param is not None:
            with lp_param.opened(reads=not lp_param.is_whole, changes=True) as target:
                target.copy_(self.sub_groups[index].master)

    @contextmanager
    def opened(self, index: int, *, changes: bool = False) -> Iterator[None]:
        lp_param = self._vectors[index].lp_param
        with ExitStack() as stack:
            if lp_param is not None:
                place = stack.enter_context(lp_param.opened(changes=changes))
                stack.enter_context(_pointing(self.sub_groups[index].lp_param, place))
            for vector in self._kept(index):
                vector.fetch()
            self._point(index, lambda vector: vector.take(), begins=False)
            try:
                yield
            finally:
                self._settle(index, changed=changes)

    @contextmanager
    def viewing(self) -> Iterator[None]:
        self.flush()
        for index in range(len(self.sub_groups)):
            self._point(index, lambda vector: vector.view(), begins=False)
        try:
            yield
        finally:
            for index in range(len(self.sub_groups)):
                self._put_away(index)

    @property
    def always_at_hand(self) -> bool:
        return all(vector.tensor is not None for index in range(len(self.sub_groups)) for vector in self._kept(index))

    def forget_states(self, index: int) -> None:
        states = self._states[index]
        for position, name in [place for place in states if (index, *place) not in self._reserved]:
            states.pop((position, name)).free()

    def flush(self) -> None:
        for index in range(len(self.sub_groups)):
            self._flush(index)

    # One shard

    def _kept(self, index: int) -> list[Vector]:
        return [self._vectors[index].master, *self._states[index].values()]

    def _fetch(self, index: int) -> None:
        self._vectors[index].gradient().fetch()
        for vector in self._kept(index):
            vector.fetch()

    def _leave(self, index: int) -> None:
        self._settle(index, changed=True)
        self._vectors[index].gradient().release(changed=False)

    def _point(self, index: int, values: Callable[[Vector], Tensor], *, begins: bool = True) -> None:
        """Let the optimizer's tensors show what `values` gives; with `begins` also states it does not have yet."""
        sub_group, master = self.sub_groups[index], self._vectors[index].master
        if master.tensor is None:
            _show_master(sub_group, values(master))
        for (position, name), vector in self._states[index].items():
            parameter = sub_group.tensors[position].parameter
            is_known = name in self._optimizer.state.get(parameter, {})
            if (is_known and vector.tensor is None) or (begins and not is_known):
                self._optimizer.state[parameter][name] = values(vector).view(parameter.shape)

    def _settle(self, index: int, *, changed: bool) -> None:
        """Take over states that were made or replaced since they were fetched, and release."""
        fetched = self._kept(index)
        store = self._vectors[index].states
        if store is not None:
            self._keep_states(index, store)
        kept = set(map(id, self._kept(index)))
        for vector in fetched:
            vector.release(changed=changed)
            if id(vector) not in kept:
                vector.free()
        self._put_away(index)

    def _keep_states(self, index: int, store: Store) -> None:
        states = self._states[index]
        for position, tensor in enumerate(self.sub_groups[index].tensors):
            for name, value in self._optimizer.state.get(tensor.parameter, {}).items():
                if not _is_per_element(name, value, tensor.parameter):
                    continue
                known = states.get((position, name))
                if known is None or known.dtype != value.dtype:
                    states[position, name] = store.adopt(self._name(index, name), value.reshape(-1))
                elif known.take().data_ptr() != value.data_ptr():
                    known.take().copy_(value.reshape(-1))

    def _put_away(self, index: int) -> None:
        sub_group = self.sub_groups[index]
        if self._vectors[index].master.tensor is None:
            _show_master(sub_group, absent(sub_group.part.numel, sub_group.master.dtype))
        for (position, name), vector in self._states[index].items():
            state = self._optimizer.state.get(sub_group.tensors[position].parameter, {})
            if vector.tensor is None and name in state:
                state[name] = absent(vector.numel, vector.dtype).view(state[name].shape)

    def _flush(self, index: int) -> None:
        lp_param = self._vectors[index].lp_param
        for vector in (*self._kept(index), *([lp_param] if lp_param is not None else [])):
            vector.flush()

    def _name(self, index: int, name: str) -> str:
        sub_group = self.sub_groups[index]
        return f"{name} of bucket {sub_group.bucket} [{sub_group.part.start}:{sub_group.part.stop}]"


def _show_master(sub_group: SubGroup, values: Tensor) -> None:
    sub_group.master.data = values
    for tensor in sub_group.tensors:
        part = values.narrow(0, tensor.interval.start, tensor.interval.numel)
        tensor.parameter.data = part.view(tensor.parameter.shape)


@contextmanager
def _pointing(tensor: Tensor | None, values: Tensor) -> Iterator[None]:
    """`tensor` shows `values` for the length of a `with`."""
    assert tensor is not None
    before = tensor.data
    tensor.data = values
    try:
        yield
    finally:
        tensor.data = before


def _is_per_element(name: str, value: Any, parameter: Tensor) -> bool:
    return (
        isinstance(value, Tensor)
        and name not in COUNTERS
        and value.numel() == parameter.numel()
        and (value.dim() > 0 or parameter.dim() == 0)
    )
