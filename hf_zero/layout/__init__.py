"""Pure integers: which parameter lies where on the flat line, and which rank owns which interval."""

from hf_zero.layout.buckets import (
    ALIGN_NUMEL,
    Bucket,
    FlatLayout,
    Interval,
    ParameterSpec,
    Piece,
    Run,
    Slot,
    chunk_numel,
    effective_bucket_numel,
    plan_layout,
)
from hf_zero.layout.units import MemberSpec, RowLayout, ShardSlot, lay_rows

__all__ = [
    "ALIGN_NUMEL",
    "Bucket",
    "FlatLayout",
    "Interval",
    "MemberSpec",
    "ParameterSpec",
    "Piece",
    "RowLayout",
    "Run",
    "ShardSlot",
    "Slot",
    "chunk_numel",
    "effective_bucket_numel",
    "lay_rows",
    "plan_layout",
]
