"""What one rank updates as one: the one owner of its master weights, its optimizer states and where they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Event

from torch import Tensor, nn

from hf_zero.layout import Bucket, Interval, Piece
from hf_zero.layout.buckets import pieces_of_sub_group
from hf_zero.offload.vector import Store, Vector, at_hand_or_absent

READERS: set[Event] = set()  # each is set when somebody beside training has read masters and states


def wait_for_readers() -> None:
    """Masters and states are not changed before."""
    for reader in list(READERS):
        reader.wait()


@dataclass(slots=True)
class StoredSubGroup:
    """Where a sub-group is between its updates.

    Attributes:
        group: index of the optimizer's param group.
        part: which elements of the rank's part of the bucket these are.
        master: the weights in the master dtype; the same vector as the weights where those have that dtype.
        lp_param: where rounded weights go after an update; None when the master is the weight itself.
        states: where the optimizer's states go; None: they stay where the optimizer makes them, beside the master.
        vectors: the states that are kept there, by position of the tensor and name.
        reserved: those among them for which room was made before the first update.
    """

    group: int
    part: Interval
    master: Vector
    lp_param: Vector | None
    states: Store | None = None
    vectors: dict[tuple[int, str], Vector] = field(default_factory=dict)
    reserved: set[tuple[int, str]] = field(default_factory=set)

    @property
    def kept(self) -> list[Vector]:
        """Masters and states."""
        return [self.master, *self.vectors.values()]

    @property
    def is_at_hand(self) -> bool:
        """Whether an update finds everything in place; states that the optimizer makes will be there too."""
        lp_at_hand = self.lp_param is None or self.lp_param.tensor is not None
        return self.master.tensor is not None and lp_at_hand and self.states is None


@dataclass(frozen=True, slots=True)
class MasterTensor:
    """One tensor that the base optimizer holds in its `param_groups`: a view of `interval` of the sub-group.

    Attributes:
        whole: index of the parameter that it is, whole and in its own shape; None for a flat part of several.
    """

    parameter: nn.Parameter
    interval: Interval
    whole: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SubGroup:
    """What one rank updates of one bucket for one of the optimizer's groups, or a part of that.

    Attributes:
        bucket: index of the bucket.
        part: which elements of the rank's part of the bucket these are.
        group: index of the optimizer's param group.
        master: 1-D master weights; NaN without memory while they are away.
        lp_param: 1-D, same length, where the rounded weights go; None when the master is the weight.
        tensors: how the base optimizer sees `master`: one flat tensor, or one tensor per parameter.
        pieces: which parameters lie where in `master`.
        stored: where all of it is between updates; None: in place.
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
    """The sub-group over what is stored.

    Args:
        owned: the interval of the bucket that this rank updates.
        whole: the bucket's parameters, to give the optimizer each of them in its own shape (possible only where a rank
            owns whole buckets); None: it sees one flat tensor.
    """
    master, part = at_hand_or_absent(stored.master), stored.part
    tensors: tuple[MasterTensor, ...] = (MasterTensor(nn.Parameter(master), Interval(0, part.numel)),)
    if whole is not None:
        assert part.numel == bucket.numel, "whole tensors need whole buckets"
        tensors = tuple(
            MasterTensor(
                nn.Parameter(master.narrow(0, slot.offset, slot.numel).view(parameter.shape)),
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
