"""Cuts what a rank owns of a bucket into the sub-groups that an update takes one after the other."""

from __future__ import annotations

from hf_zero.layout.buckets import Bucket, Piece
from hf_zero.layout.intervals import Interval, round_up

# Vectorised kernels treat the last few elements of a vector apart. Cuts at multiples of this many make no new ends.
CUT_NUMEL = 64


def cut_sub_groups(bucket: Bucket, owned: Interval, limit: int | None) -> tuple[tuple[int, Interval], ...]:
    """(optimizer group, elements of `owned`) of every sub-group, in order; they cover `owned`.

    Args:
        limit: none has more elements than this, rounded up to a multiple of `CUT_NUMEL`; None: one for each run.
    """
    found = []
    for number, run in enumerate(bucket.runs):
        stop = bucket.runs[number + 1].start if number + 1 < len(bucket.runs) else owned.numel
        step = stop - run.start if limit is None else round_up(max(1, limit), CUT_NUMEL)
        for start in range(run.start, stop, max(1, step)):
            found.append((run.group, Interval(start, min(start + step, stop))))
    return tuple(found)


def pieces_of_sub_group(bucket: Bucket, owned: Interval, part: Interval) -> tuple[Piece, ...]:
    """Which parts of which parameters lie in elements `part` of `owned`; `in_shard` counts from where `part` begins."""
    found = []
    for piece in bucket.pieces(owned):
        common = Interval(piece.in_shard, piece.in_shard + piece.numel).intersect(part)
        if common is not None:
            skipped = common.start - piece.in_shard
            found.append(Piece(piece.parameter, common.start - part.start, piece.in_parameter + skipped, common.numel))
    return tuple(found)
