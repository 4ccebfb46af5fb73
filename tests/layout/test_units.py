"""The row layout of stage 3: a table to check by eye, and properties for any sizes."""

from __future__ import annotations

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from hf_zero.kernels.accumulate import add_rows, read_rows, write_rows
from hf_zero.layout import MemberSpec, Run, chunk_numel, lay_rows


def test_trained_parameters_come_first_and_groups_follow_each_other() -> None:
    members = [MemberSpec(0, 20, 1), MemberSpec(1, 5, None), MemberSpec(2, 33, 0), MemberSpec(3, 4, 1)]
    layout = lay_rows(members, world=2, dtype="bfloat16", full_align=32)
    table = [(slot.member, slot.chunk, slot.offset, slot.full_offset) for slot in layout.slots]
    assert table == [
        (2, 17, 0, 0),  # group 0: ceil(33 / 2), the next one at a multiple of 8
        (0, 10, 24, 64),  # group 1
        (3, 2, 40, 96),
        (1, 3, 48, 128),  # frozen
    ]
    assert layout.runs == (Run(0, 0), Run(1, 24))
    assert (layout.trained_numel, layout.row_numel, layout.full_numel) == (48, 56, 160)


def test_the_gradients_bucket_is_the_trained_part_of_every_row() -> None:
    members = [MemberSpec(0, 7, 0), MemberSpec(1, 9, None)]
    bucket = lay_rows(members, world=3, dtype="float32", full_align=32).bucket(4, {0: 11, 1: -1})
    assert (bucket.index, bucket.numel, bucket.shard_numel) == (4, 24, 8)
    pieces = [bucket.pieces(bucket.shard(rank)) for rank in range(3)]
    assert [[(p.parameter, p.in_shard, p.in_parameter, p.numel) for p in owned] for owned in pieces] == [
        [(11, 0, 0, 3)],
        [(11, 0, 3, 3)],
        [(11, 0, 6, 1)],
    ]
    assert [(gap.start, gap.stop) for gap in bucket.gaps()] == [(3, 8)]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 200), st.sampled_from([None, 0, 1])), min_size=1, max_size=8),
    world=st.integers(1, 9),
)
def test_every_element_has_one_owner(sizes: list[tuple[int, int | None]], world: int) -> None:
    assume(any(group is not None for _, group in sizes))
    members = [MemberSpec(index, numel, group) for index, (numel, group) in enumerate(sizes)]
    layout = lay_rows(members, world=world, dtype="float32", full_align=32)
    bucket = layout.bucket(0, {index: index for index in range(len(sizes))})
    owned: dict[int, list[int]] = {}
    for rank in range(world):
        for piece in bucket.pieces(bucket.shard(rank)):
            owned.setdefault(piece.parameter, []).extend(range(piece.in_parameter, piece.in_parameter + piece.numel))
    trained = {index: list(range(numel)) for index, (numel, group) in enumerate(sizes) if group is not None}
    assert owned == trained
    assert all(slot.chunk == chunk_numel(slot.numel, world) for slot in layout.slots)


@given(numel=st.integers(1, 60), world=st.integers(1, 7), padding=st.integers(0, 3))
def test_rows_give_back_what_was_written(numel: int, world: int, padding: int) -> None:
    chunk = chunk_numel(numel, world)
    values = torch.arange(1.0, numel + 1)
    rows = torch.full((world, chunk + padding), float("nan"))[:, :chunk]
    write_rows(rows, values)
    assert rows.reshape(-1)[:numel].equal(values) and not rows.reshape(-1)[numel:].any()
    add_rows(rows, values)
    again = torch.empty(numel)
    read_rows(again, rows)
    assert again.equal(2 * values)
