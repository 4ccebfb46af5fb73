"""Where a rank's master weights and moments lie in memory, as extents; the counterpart of `partitions` on disk."""

from __future__ import annotations

from collections.abc import Iterator

from hf_zero.layout.buckets import FlatLayout
from hf_zero.layout.intervals import Interval
from hf_zero.layout.reshard import Extent


def extents_in_memory(layout: FlatLayout, rank: int, *, sharded: bool) -> Iterator[Extent]:
    """What `rank` updates. Buffers are numbered as the master shards: one per bucket and optimizer group in it.

    Args:
        sharded: whether every rank owns its part of each bucket; otherwise it owns all of it.
    """
    buffer = 0
    for bucket in layout.buckets:
        owned = bucket.shard(rank) if sharded else Interval(0, bucket.numel)
        pieces = bucket.pieces(owned)
        for number, run in enumerate(bucket.runs):
            stop = bucket.runs[number + 1].start if number + 1 < len(bucket.runs) else owned.numel
            for piece in pieces:
                if run.start <= piece.in_shard < stop:
                    offset = piece.in_shard - run.start
                    yield Extent(piece.parameter, piece.in_parameter, piece.numel, rank, buffer, offset)
            buffer += 1
