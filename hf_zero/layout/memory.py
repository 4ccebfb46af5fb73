"""Where a rank's master weights and moments lie in memory, as extents; the counterpart of `partitions` on disk."""

from __future__ import annotations

from collections.abc import Iterator

from hf_zero.layout.buckets import FlatLayout
from hf_zero.layout.intervals import Interval
from hf_zero.layout.reshard import Extent
from hf_zero.layout.sub_groups import cut_sub_groups, pieces_of_sub_group


def extents_in_memory(
    layout: FlatLayout, rank: int, *, sharded: bool, sub_group_numel: int | None = None
) -> Iterator[Extent]:
    """What `rank` updates. Buffers are numbered as the master shards: the sub-groups of all buckets.

    Args:
        sharded: whether every rank owns its part of each bucket; otherwise it owns all of it.
        sub_group_numel: the limit that sub-groups were cut by; None: one per optimizer group in a bucket.
    """
    buffer = 0
    for bucket in layout.buckets:
        owned = bucket.shard(rank) if sharded else Interval(0, bucket.numel)
        for _, part in cut_sub_groups(bucket, owned, sub_group_numel):
            for piece in pieces_of_sub_group(bucket, owned, part):
                yield Extent(piece.parameter, piece.in_parameter, piece.numel, rank, buffer, piece.in_shard)
            buffer += 1
