"""Autotuning: trials of stages and batch sizes, started by the launcher, and trials of what a plan has chosen."""

from __future__ import annotations

from hf_zero.config.features import Extra, OwnSection
from hf_zero.extras.autotuning.section import Autotuning, examine

EXTRA = Extra(
    name="autotuning",
    sections=(
        OwnSection(
            path="autotuning", kind=Autotuning, doc="Search for the fastest stage and batch (docs/planning.md)."
        ),
    ),
    examine=examine,
    features=("hf_zero.extras.autotuning.measure:trial_of",),
    services={
        "tune": "hf_zero.extras.autotuning.tuning:tune",
        "measure": "hf_zero.extras.autotuning.measure:measured_plan",
    },
)
