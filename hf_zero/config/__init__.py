"""Parses ds.json and resolves it into frozen, typed policies."""
# ruff: noqa: F401  (what other packages import from here)

from __future__ import annotations

from hf_zero.config.errors import ConfigError, Other, Problem
from hf_zero.config.load import load_config
from hf_zero.config.policies import (
    AutocastPolicy,
    BatchPolicy,
    Findings,
    GradientPolicy,
    InitPolicy,
    LossScalePolicy,
    OptimizerPolicy,
    OptimizerSees,
    PrecisionPolicy,
    Provenance,
    Resolved,
    SchedulerPolicy,
    ZeroPolicy,
)
from hf_zero.config.resolve import examine, resolve, resolve_extra, resolve_for_init
from hf_zero.config.schema.training import Aio
from hf_zero.config.schema.zero import OffloadOptimizer, OffloadParam, Zero
from hf_zero.config.sources import AcceleratorView, ConfigDict, Given, ModelView, Source, TrainingView, Views
