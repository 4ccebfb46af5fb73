"""Elasticity: one batch that goes with as many numbers of ranks as possible."""

from __future__ import annotations

from hf_zero.config.features import Extra, OwnSection
from hf_zero.extras.elasticity.rules import Elasticity, elastic_sizes

EXTRA = Extra(
    name="elasticity",
    sections=(
        OwnSection(
            path="elasticity", kind=Elasticity, doc="Batch sizes for many numbers of ranks (docs/elasticity.md)."
        ),
    ),
    sizes=elastic_sizes,
)
