"""The sub-group: elements that a rank updates together, with their masters, optimizer states and storage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_zero.layout import Bucket, Interval, Piece
from hf_zero.layout.buckets import pieces_of_sub_group
from hf_zero.offload.vector import Store, Vector, at_hand_or_absent

Context = Callable[[], AbstractContextManager[object]]
READERS: set[threading.Event] = set()  # each is set when a concurrent reader has copied masters and states


def wait_for_readers() -> None:
    """Wait until concurrent readers have copied masters and states, which may then change."""
    for reader in list(READERS):
        reader.wait()


class DeferredUpdate:
    """The part of a step's update that runs when its result is needed, or beside the next forward.

        host       backward | step | forward 0 | update 2 | forward 1 | update 3 | ...     queues work, and updates
        device     backward ..........| forward 0 ..........| forward 1 ..........| ...
        update               [update 0] [update 1]                                         of the device

    Weights that are updated in host memory are next read when their unit is gathered. Until then the update may wait,
    so that the device computes the units before it meanwhile. What the device updates is queued on a lane of its own.
    Everything else that reads or writes masters, states, gradients or shards calls `finish` first, so no program sees
    the difference.
    """

    def __init__(self) -> None:
        self._updates: Iterator[int] = iter(())
        self._left: set[int] = set()
        self._around: Context = nullcontext
        self._join: Callable[[], None] = lambda: None
        self._is_running = False
        self._is_joined = True  # whether `finish` has made its lane wait for all parts
        self._keeps_inputs = False  # whether the end of `updates`, which frees them, waits for `finish`

    @property
    def is_pending(self) -> bool:
        return bool(self._left)

    def begin(
        self,
        updates: Iterator[int],
        buckets: Iterable[int],
        around: Context,
        join: Callable[[], None],
        *,
        on_update_lane: bool = False,
    ) -> None:
        """Defer `updates`, which yields each of `buckets` when its last sub-group has been updated.

        Args:
            around: context of every part of the update, which may be on another lane of the device.
            join: makes the calling lane wait for the parts so far.
            on_update_lane: whether that lane of the device runs parts, also some before this call. What they read and
                `updates` holds, such as learning rates, is kept until `finish`.
        """
        assert not self._left, "the previous update has been finished"
        self._updates, self._left, self._around, self._join = updates, set(buckets), around, join
        self._is_joined, self._keeps_inputs = not on_update_lane, on_update_lane

    def run_until(self, bucket: int) -> None:
        """Update everything up to this bucket, unless that is done. Called on the lane of the update."""
        self._run(lambda: bucket in self._left)

    def finish(self) -> None:
        """Update everything that is left. The calling lane may read and write everything then."""
        self._run(lambda: bool(self._left))
        if not self._is_joined and not self._is_running:
            self._is_joined = True
            self._join()
            if self._keeps_inputs:
                self._keeps_inputs = False
                next(self._updates, None)  # what comes after the last bucket

    def _run(self, is_wanted: Callable[[], bool]) -> None:
        if self._is_running or not is_wanted():  # the update itself reads masters and states
            return
        self._is_running, self._is_joined = True, False
        try:
            with torch.inference_mode(False), torch.no_grad(), self._around():
                while is_wanted():
                    self._left.discard(next(self._updates))
                if not self._left and not self._keeps_inputs:
                    next(self._updates, None)  # what comes after the last bucket
        except BaseException:
            self._left.clear()  # nothing can continue it, as after an error in a step
            raise
        finally:
            self._is_running = False


@dataclass(slots=True)
class StoredSubGroup:
    """The storage of a sub-group between its updates.

    Attributes:
        group: index of the optimizer's param group.
        part: its elements in the rank's part of the bucket.
        master: the weights in the master dtype; the same vector as the weights if these have that dtype.
        lp_param: target of the rounded weights after an update; None if the master is the weight itself.
        weights: the weights where they are stored, which `lp_param` shows in the memory of the update.
        states: store of the optimizer states; None: they stay where the optimizer creates them, next to the master.
        vectors: the stored states, by position of the tensor and name.
        reserved: those with storage reserved before the first update.
    """

    group: int
    part: Interval
    master: Vector
    lp_param: Vector | None
    weights: Vector
    states: Store | None = None
    vectors: dict[tuple[int, str], Vector] = field(default_factory=dict)
    reserved: set[tuple[int, str]] = field(default_factory=set)

    @property
    def kept(self) -> list[Vector]:
        """Masters and states."""
        return [self.master, *self.vectors.values()]

    @property
    def is_at_hand(self) -> bool:
        """Whether everything is in the memory of the update, including states that the optimizer will create."""
        lp_at_hand = self.lp_param is None or self.lp_param.tensor is not None
        return self.master.tensor is not None and lp_at_hand and self.states is None


@dataclass(frozen=True, slots=True)
class MasterTensor:
    """One tensor that the base optimizer holds in its `param_groups`: a view of `interval` of the sub-group.

    Attributes:
        whole: index of the parameter, if this is a whole parameter in its own shape; None for a flat part of several.
    """

    parameter: nn.Parameter
    interval: Interval
    whole: int | None = None


@dataclass(slots=True, eq=False)
class SubGroup:
    """A rank's part of one bucket for one optimizer group, or a part of that, which is updated together. Only
    `OffloadStager.move` replaces its tensors.

    Attributes:
        bucket: index of the bucket.
        part: its elements in the rank's part of the bucket.
        group: index of the optimizer's param group.
        master: 1-D masters; NaN without memory while they are offloaded.
        lp_param: 1-D target of the rounded weights, with the same length; None if the master is the weight.
        tensors: the base optimizer's view of `master`: one flat tensor, or one tensor per parameter.
        pieces: the places of parameters in `master`.
        stored: the storage between updates; None: in memory.
    """

    bucket: int
    part: Interval
    group: int
    master: Tensor
    lp_param: Tensor | None
    tensors: tuple[MasterTensor, ...]
    pieces: tuple[Piece, ...]
    stored: StoredSubGroup | None = None

    def __str__(self) -> str:
        return f"bucket {self.bucket} [{self.part.start}:{self.part.stop}]"


def sub_group(
    bucket: Bucket, owned: Interval, stored: StoredSubGroup, whole: Sequence[nn.Parameter] | None = None
) -> SubGroup:
    """Create a sub-group over its storage.

    Args:
        owned: the interval of the bucket that this rank updates.
        whole: the bucket's parameters, to give the optimizer each of them in its own shape (only if a rank owns whole
            buckets); None: one flat tensor.
    """
    master, part = at_hand_or_absent(stored.master), stored.part
    tensors: tuple[MasterTensor, ...] = (MasterTensor(_apart(master), Interval(0, part.numel)),)
    if whole is not None:
        assert part.numel == bucket.numel, "whole tensors need whole buckets"
        tensors = tuple(
            MasterTensor(
                _apart(master.narrow(0, slot.offset, slot.numel).view(parameter.shape)),
                slot.interval,
                whole=slot.parameter,
            )
            for slot, parameter in zip(bucket.slots, whole, strict=True)
        )
    return SubGroup(
        bucket=bucket.index,
        part=part,
        group=stored.group,
        master=master,
        lp_param=None if stored.lp_param is None else at_hand_or_absent(stored.lp_param),
        tensors=tensors,
        pieces=pieces_of_sub_group(bucket, owned, part),
        stored=stored,
    )


def _apart(values: Tensor) -> nn.Parameter:
    """A parameter in the same memory whose version counts the writes of the optimizer and of programs alone."""
    return nn.Parameter(values.data)
