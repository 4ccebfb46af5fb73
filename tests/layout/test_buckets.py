"""The layout is pure arithmetic: tables to check by eye, and general properties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_zero.layout import (
    FlatLayout,
    Interval,
    ParameterSpec,
    Piece,
    effective_bucket_numel,
    plan_layout,
)
from hf_zero.layout.buckets import ALIGN_NUMEL, MAX_BUCKET_NUMEL, MIN_BUCKET_NUMEL


def specs(*rows: tuple[str, int] | tuple[str, int, int] | tuple[str, int, int, str]) -> list[ParameterSpec]:
    """(name, numel[, group[, dtype]]) rows as specs."""
    return [
        ParameterSpec(row[0], row[1], row[2] if len(row) > 2 else 0, row[3] if len(row) > 3 else "float32")
        for row in rows
    ]


def table(layout: FlatLayout) -> list[tuple[str, int, list[tuple[str, int]]]]:
    """(group and dtype, padded size, [(name, offset)]) per bucket, in launch order."""
    return [
        (
            f"{bucket.runs[0].group}:{bucket.dtype}",
            bucket.numel,
            [(layout.specs[slot.parameter].name, slot.offset) for slot in bucket.slots],
        )
        for bucket in layout.buckets
    ]


def test_parameters_are_grouped_backwards_and_laid_out_forwards() -> None:
    layout = plan_layout(specs(("a", 32), ("b", 40), ("c", 5), ("d", 64)), world=2, bucket_numel=72)
    assert table(layout) == [
        ("0:float32", 128, [("c", 0), ("d", 32)]),
        ("0:float32", 128, [("a", 0), ("b", 32)]),
    ]


def test_a_parameter_larger_than_the_bucket_goes_alone() -> None:
    layout = plan_layout(specs(("a", 10), ("big", 500), ("b", 10)), world=1, bucket_numel=100)
    assert [[name for name, _ in members] for _, _, members in table(layout)] == [["b"], ["big"], ["a"]]


def test_groups_and_dtypes_never_share_a_bucket() -> None:
    rows = specs(("w", 64, 0, "bfloat16"), ("n", 8, 1, "bfloat16"), ("v", 64, 0, "float32"), ("m", 8, 1, "bfloat16"))
    layout = plan_layout(rows, world=1, bucket_numel=1000)
    assert table(layout) == [
        ("0:float32", 64, [("v", 0)]),
        ("1:bfloat16", 64, [("n", 0), ("m", 32)]),
        ("0:bfloat16", 64, [("w", 0)]),
    ]


def test_buckets_stand_in_the_order_in_which_backward_completes_them() -> None:
    """The bucket of the small norms is complete only when the first layer's gradient has arrived."""
    rows = specs(("norm0", 8, 1), ("w0", 64), ("norm1", 8, 1), ("w1", 64))
    assert [[name for name, _ in members] for _, _, members in table(plan_layout(rows, world=1, bucket_numel=64))] == [
        ["w1"],
        ["w0"],
        ["norm0", "norm1"],
    ]


def test_shards_are_equal_and_pieces_say_who_owns_what() -> None:
    (bucket,) = plan_layout(specs(("a", 40), ("b", 50)), world=2, bucket_numel=1000).buckets
    # a at [0, 40), padding to 64, b at [64, 114), padding to 128; two shards of 64
    assert bucket.numel == 128 and bucket.shard_numel == 64
    assert bucket.pieces(bucket.shard(0)) == (Piece(0, 0, 0, 40),)
    assert bucket.pieces(bucket.shard(1)) == (Piece(1, 0, 0, 50),)
    assert bucket.pieces(Interval(30, 70)) == (Piece(0, 0, 30, 10), Piece(1, 34, 0, 6))
    assert bucket.gaps() == (Interval(40, 64), Interval(114, 128))


@pytest.mark.parametrize(
    ("total", "limit", "expected"),
    [
        (100, 500_000_000, MIN_BUCKET_NUMEL),  # a small model is one bucket
        (110_000_000, 500_000_000, 13_750_000),  # an eighth
        (7_000_000_000, 500_000_000, MAX_BUCKET_NUMEL),  # no benefit beyond this
        (110_000_000, 262_144, 262_144),  # the configured limit wins
        (110_000_000, 0, 1),
    ],
)
def test_effective_bucket_size(total: int, limit: int, expected: int) -> None:
    assert effective_bucket_numel(total, limit) == expected


def test_a_large_bucket_that_the_user_gives_is_respected_on_many_ranks() -> None:
    """On 512 ranks `reduce_bucket_size: 2e8` made buckets of 2^25 elements, of which each rank reduced 128 KiB."""
    assert effective_bucket_numel(7_000_000_000, 200_000_000, 512, is_given=True) == 200_000_000
    assert effective_bucket_numel(7_000_000_000, 200_000_000, 512) == MAX_BUCKET_NUMEL
    assert effective_bucket_numel(7_000_000_000, 200_000_000, 255, is_given=True) == MAX_BUCKET_NUMEL


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="world >= 1"):
        plan_layout(specs(("a", 4)), world=0, bucket_numel=10)
    with pytest.raises(ValueError, match="'a' has 0 elements"):
        plan_layout(specs(("a", 0)), world=1, bucket_numel=10)
    with pytest.raises(ValueError, match="start <= stop"):
        Interval(3, 2)
    assert Interval(0, 4).intersect(Interval(4, 6)) is None
    with pytest.raises(ValueError, match="outside a world of 1"):
        plan_layout(specs(("a", 4)), world=1, bucket_numel=10).buckets[0].shard(1)


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 400), st.integers(0, 2), st.sampled_from(["float32", "bfloat16"])),
        min_size=1,
        max_size=30,
    ),
    world=st.integers(1, 7),
    bucket_numel=st.integers(1, 600),
)
def test_every_element_has_exactly_one_place_and_one_owner(
    sizes: list[tuple[int, int, str]], world: int, bucket_numel: int
) -> None:
    rows = [ParameterSpec(f"p{i}", numel, group, dtype) for i, (numel, group, dtype) in enumerate(sizes)]
    layout = plan_layout(rows, world=world, bucket_numel=bucket_numel)
    placed = sorted(slot.parameter for bucket in layout.buckets for slot in bucket.slots)
    assert placed == list(range(len(rows)))
    for index, owner in enumerate(layout.bucket_of()):
        assert any(slot.parameter == index for slot in layout.buckets[owner].slots)
    for bucket in layout.buckets:
        assert bucket.numel == world * bucket.shard_numel and bucket.shard_numel % ALIGN_NUMEL == 0
        assert len({(rows[slot.parameter].group, rows[slot.parameter].dtype) for slot in bucket.slots}) == 1
        used_numel = sum(slot.numel for slot in bucket.slots)
        assert len(bucket.slots) == 1 or used_numel <= bucket_numel
        assert all(slot.offset % ALIGN_NUMEL == 0 for slot in bucket.slots)
        covered = sorted([slot.interval for slot in bucket.slots] + list(bucket.gaps()), key=lambda part: part.start)
        assert [part.start for part in covered] == [0, *(part.stop for part in covered[:-1])]
        assert covered[-1].stop == bucket.numel
        owned = [piece for rank in range(world) for piece in bucket.pieces(bucket.shard(rank))]
        assert sum(piece.numel for piece in owned) == used_numel
        for slot in bucket.slots:
            parts = [piece for piece in owned if piece.parameter == slot.parameter]
            assert [piece.in_parameter for piece in parts] == [
                sum(earlier.numel for earlier in parts[:position]) for position in range(len(parts))
            ]
