"""The elements that a rank updates, divided into sub-groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hf_zero.layout import Interval, MemberSpec, ParameterSpec, lay_rows, plan_layout
from hf_zero.layout.buckets import CUT_NUMEL, cut_sub_groups, pieces_of_sub_group


def test_a_limit_cuts_every_group_anew() -> None:
    layout = lay_rows([MemberSpec(0, 300, 0), MemberSpec(1, 40, 1)], world=2, dtype="float32", full_align=32)
    bucket = layout.bucket(0, {0: 5, 1: 6})
    row = Interval(0, bucket.shard_numel)
    assert cut_sub_groups(bucket, row, None) == ((0, Interval(0, 152)), (1, Interval(152, 176)))
    assert cut_sub_groups(bucket, row, 100) == ((0, Interval(0, 128)), (0, Interval(128, 152)), (1, Interval(152, 176)))
    second = pieces_of_sub_group(bucket, row, Interval(128, 152))
    assert [(p.parameter, p.in_shard, p.in_parameter, p.numel) for p in second] == [(5, 0, 128, 22)]


@given(
    numels=st.lists(st.integers(1, 500), min_size=1, max_size=6),
    world=st.integers(1, 4),
    limit=st.none() | st.integers(1, 400),
    data=st.data(),
)
def test_sub_groups_cover_everything_once_and_so_do_their_pieces(
    numels: list[int], world: int, limit: int | None, data: st.DataObject
) -> None:
    specs = [ParameterSpec(f"p{i}", numel, 0, "float32") for i, numel in enumerate(numels)]
    for bucket in plan_layout(specs, world=world, bucket_numel=data.draw(st.integers(1, 1000))).buckets:
        for rank in range(world):
            owned = bucket.shard(rank)
            parts = [part for _, part in cut_sub_groups(bucket, owned, limit)]
            assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
            assert parts[-1].stop == owned.numel
            assert all(part.start % CUT_NUMEL == 0 for part in parts), "no new ends for vectorised kernels"
            whole = {
                (p.parameter, p.in_parameter + i, p.in_shard + i) for p in bucket.pieces(owned) for i in range(p.numel)
            }
            cut = [
                (piece.parameter, piece.in_parameter + i, part.start + piece.in_shard + i)
                for part in parts
                for piece in pieces_of_sub_group(bucket, owned, part)
                for i in range(piece.numel)
            ]
            assert len(cut) == len(whole) and set(cut) == whole
