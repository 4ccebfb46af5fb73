"""Parses ds.json and resolves it into frozen, typed policies (`pipeline` has the stages)."""
# ruff: noqa: F401  (what other packages import from here)

from __future__ import annotations

from hf_zero.config.errors import ConfigError, Other, Problem
from hf_zero.config.pipeline import examine, resolve, resolve_extra, resolve_for_init
from hf_zero.config.policies import Findings, Provenance, Resolved
from hf_zero.config.read import load_config
from hf_zero.config.schema.batch import BatchPolicy
from hf_zero.config.schema.checkpoint import Aio
from hf_zero.config.schema.optimizer import OptimizerPolicy, SchedulerPolicy
from hf_zero.config.schema.precision import AutocastPolicy, LossScalePolicy, PrecisionPolicy
from hf_zero.config.schema.root import GradientPolicy
from hf_zero.config.schema.zero import InitPolicy, OffloadOptimizer, OffloadParam, OptimizerSees, Zero, ZeroPolicy
from hf_zero.config.sources import ConfigDict, Source
from hf_zero.config.views import AcceleratorView, Given, ModelView, TrainingView, Views
