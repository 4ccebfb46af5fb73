"""Integer arithmetic: the place of each parameter in flat buffers, and the interval that each rank owns."""
# ruff: noqa: F401  (re-exported for other packages)

from hf_zero.layout.buckets import (
    ALIGN_NUMEL,
    Bucket,
    FlatLayout,
    Interval,
    MemberSpec,
    ParameterSpec,
    Piece,
    RowLayout,
    Run,
    ShardSlot,
    Slot,
    chunk_interval,
    chunk_numel,
    effective_bucket_numel,
    lay_rows,
    plan_layout,
    stay_gathered,
)
