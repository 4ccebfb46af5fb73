"""The sharding of each ZeRO stage, as data (Rajbhandari et al. 2020, arXiv 1910.02054)."""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.layout import Bucket, Interval


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which of the three kinds of states are sharded: see the table of stages in docs/architecture.md.

    Attributes:
        rank: index of this rank's shard.
        world: number of shards.
        alone: shard even if one rank has all shards, because they are offloaded.
        replica: index of the replica that this rank belongs to.
        num_replicas: number of replicas of the shards.
        kept_rows: the rows of stage 3's units that a rank keeps: with hpZ more than its own.
    """

    stage: int
    rank: int
    world: int
    alone: bool = False
    replica: int = 0
    num_replicas: int = 1
    kept_rows: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.world * self.num_replicas

    @property
    def shards_optimizer(self) -> bool:
        return self._shards_from(1)

    @property
    def shards_gradients(self) -> bool:
        return self._shards_from(2)

    @property
    def shards_parameters(self) -> bool:
        return self._shards_from(3)

    def _shards_from(self, stage: int) -> bool:
        return self.stage >= stage and (self.world > 1 or self.alone)

    def owned(self, bucket: Bucket, rank: int | None = None) -> Interval:
        """The part of `bucket` that this rank updates; `rank`: its number among the ranks that shard the bucket, if
        that differs."""
        return bucket.shard(self.rank if rank is None else rank) if self.shards_optimizer else Interval(0, bucket.numel)
