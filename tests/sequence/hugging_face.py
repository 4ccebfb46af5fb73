"""How accelerate is told of ranks that share sequences."""

from __future__ import annotations

from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig


def parallelism(size: int, data_ranks: int = 1, **sizes: int) -> ParallelismConfig:
    handler = DeepSpeedSequenceParallelConfig()
    return ParallelismConfig(
        sp_size=size, dp_shard_size=data_ranks, sp_backend="deepspeed", sp_handler=handler, **sizes
    )
