"""Pure integers: which parameter lies where on the flat line, and which rank owns which interval."""
# ruff: noqa: F401  (what other packages import from here)

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
