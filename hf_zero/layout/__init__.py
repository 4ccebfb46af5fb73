"""Pure integers: which parameter lies where on the flat line, and which rank owns which interval."""
# ruff: noqa: F401  (what other packages import from here)

from hf_zero.layout.buckets import (
    ALIGN_NUMEL,
    Bucket,
    FlatLayout,
    Interval,
    ParameterSpec,
    Piece,
    Run,
    Slot,
    chunk_interval,
    chunk_numel,
    effective_bucket_numel,
    plan_layout,
)
from hf_zero.layout.units import MemberSpec, RowLayout, ShardSlot, lay_rows, stay_gathered
