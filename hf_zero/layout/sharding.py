"""The sharding of each ZeRO stage, as data (Rajbhandari et al. 2020, arXiv 1910.02054)."""

from __future__ import annotations

from dataclasses import dataclass

from hf_zero.layout import Bucket, Interval


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which of the three states a rank holds only in part.

    | stage | optimizer state | gradients between micro-batches | reduction of a bucket          | after the step |
    |-------|-----------------|---------------------------------|--------------------------------|----------------|
    | 0     | whole           | whole                           | all-reduce at the boundary     | nothing        |
    | 1     | shard           | whole                           | reduce-scatter at the boundary | all-gather     |
    | 2     | shard           | shard                           | reduce-scatter in every backward | all-gather   |
    | 3     | shard           | shard                           | reduce-scatter in every backward | nothing      |

    At stage 3 parameters are shards too, gathered around their use.

    Attributes:
        rank: which shard this rank holds.
        world: number of shards.
        alone: shards also where one rank has all of them: they are kept somewhere else.
        replica: which copy of the shards this rank has a part of.
        num_replicas: copies of the shards.
        kept_rows: rows of stage 3's units that a rank keeps: more than its own with hpZ.
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
        """All data-parallel ones."""
        return self.world * self.num_replicas

    @property
    def _takes_apart(self) -> bool:
        return self.world > 1 or self.alone

    @property
    def shards_optimizer(self) -> bool:
        return self.stage >= 1 and self._takes_apart

    @property
    def shards_gradients(self) -> bool:
        return self.stage >= 2 and self._takes_apart

    @property
    def shards_parameters(self) -> bool:
        return self.stage >= 3 and self._takes_apart

    def owned(self, bucket: Bucket, rank: int | None = None) -> Interval:
        """The part of `bucket` this rank updates; `rank`: its place among those that hold shards of it, where that is
        another."""
        return bucket.shard(self.rank if rank is None else rank) if self.shards_optimizer else Interval(0, bucket.numel)
