"""Lays the parameters of a stage 3 unit on equal shards, each parameter cut alone.

    three parameters, world of two     a: 5 elements    b: 4    f: 3 (frozen)
    gathered unit, one row per rank    [ a0 a1 a2 | b0 b1 | f0 f1 ]      shard of rank 0
                                       [ a3 a4  . | b2 b3 | f2  . ]      shard of rank 1      "." is padding, always 0
                                         `---- trained ----\'

Every parameter is cut into ceil(numel / world) elements per rank, as DeepSpeed does, so a rank's checkpoint holds what
the rank holds. One collective gathers the whole unit; gradients use the trained part of the rows only, which comes
first and is ordered by optimizer group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_zero.layout.buckets import Bucket, Run, Slot, chunk_numel, round_up

CHUNK_ALIGN_NUMEL = 8  # 16 bytes of a 16-bit type: wide copies stay wide, and the padding stays small at any world size


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """One parameter of a unit: `group` is its optimizer group, None when it is not trained."""

    index: int
    numel: int
    group: int | None


@dataclass(frozen=True, slots=True)
class ShardSlot:
    """Where one parameter lies: `chunk` elements at `offset` of every row, and whole at `full_offset` when gathered."""

    member: int
    numel: int
    chunk: int
    offset: int
    full_offset: int


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Which rows of a unit a rank keeps: its own, and with hpZ those of the ranks with its place in the other groups.

        world of 6, groups of 2     rows 0 1 | 2 3 | 4 5     rank 3 keeps rows 1, 3 and 5; its own is number 1 of these

    Attributes:
        group: ranks of a group, which keep all rows between them.
        place: this rank's in its group.
        own: which of the kept rows is its own.
        count: rows that it keeps, and groups.
    """

    group: int
    place: int
    own: int = 0
    count: int = 1

    def row(self, kept: int) -> int:
        """Number of a kept row among all rows of the unit."""
        return kept * self.group + self.place


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Parameters of one dtype that are gathered together.

    Attributes:
        row_numel: elements of one rank's shard.
        trained_numel: how many of them, from the start, belong to trained parameters.
        full_numel: elements of the storage that holds all parameters whole.
        runs: optimizer groups inside the trained part.
    """

    world: int
    dtype: str
    slots: tuple[ShardSlot, ...]
    row_numel: int
    trained_numel: int
    full_numel: int
    runs: tuple[Run, ...]

    def bucket(self, index: int, parameters: dict[int, int]) -> Bucket:
        """The gradients' bucket: the trained part of all rows. `parameters` maps members to the layout's specs."""
        return Bucket(
            index=index,
            dtype=self.dtype,
            world=self.world,
            numel=self.trained_numel * self.world,
            slots=tuple(
                Slot(parameters[slot.member], slot.offset, slot.numel)
                for slot in self.slots
                if slot.offset < self.trained_numel
            ),
            runs=self.runs,
            by_rows=True,
        )


def lay_rows(members: Sequence[MemberSpec], *, world: int, dtype: str, full_align: int) -> RowLayout:
    """Shard `members`: trained ones first, by group, each cut into `world` chunks.

    Args:
        full_align: whole parameters start at multiples of this many elements.
    """
    trained = sorted((member for member in members if member.group is not None), key=lambda m: (m.group, m.index))
    frozen = [member for member in members if member.group is None]
    slots: list[ShardSlot] = []
    runs: list[Run] = []
    offset = full_offset = trained_numel = 0
    for member in [*trained, *frozen]:
        if member.group is not None and (not runs or runs[-1].group != member.group):
            runs.append(Run(member.group, offset))
        chunk = chunk_numel(member.numel, world)
        slots.append(ShardSlot(member.index, member.numel, chunk, offset, full_offset))
        offset += round_up(chunk, CHUNK_ALIGN_NUMEL)
        full_offset += round_up(member.numel, full_align)
        trained_numel = offset if member.group is not None else trained_numel
    return RowLayout(
        world=world,
        dtype=dtype,
        slots=tuple(slots),
        row_numel=offset,
        trained_numel=trained_numel,
        full_numel=full_offset,
        runs=tuple(runs),
    )


def stay_gathered(numels: Sequence[int], always: Sequence[bool], *, largest: int, budget: int) -> list[bool]:
    """Which parameters stay gathered: those that must (`always`), and the small ones as long as they are few.

    Args:
        numels: elements of each parameter, in registration order.
        largest: elements of the largest small one (stage3_param_persistence_threshold).
        budget: elements of all that stay (stage3_model_persistence_threshold).
    """
    decisions = []
    for numel, must in zip(numels, always, strict=True):
        stays = must or (numel <= largest and numel <= budget)
        budget -= numel if stays else 0
        decisions.append(stays)
    return decisions
