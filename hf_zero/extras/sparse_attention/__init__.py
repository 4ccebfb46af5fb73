"""Sparse attention: which blocks of keys each block of queries sees, and attention that computes no other."""

from __future__ import annotations

from hf_zero.config.features import Extra, OwnSection
from hf_zero.extras.sparse_attention.section import SparseAttention, examine

EXTRA = Extra(
    name="sparse_attention",
    sections=(
        OwnSection(path="sparse_attention", kind=SparseAttention, doc="Sparse attention (docs/sparse_attention.md)."),
    ),
    examine=examine,
    features=("hf_zero.extras.sparse_attention.feature:sparse_attention_of",),
)
