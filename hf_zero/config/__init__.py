"""ds.json in, frozen typed policies out."""

from __future__ import annotations

from hf_zero.config.compression import CompressionPolicy
from hf_zero.config.errors import ConfigError, Other, Problem
from hf_zero.config.policies import (
    AutocastPolicy,
    BatchPolicy,
    CheckpointPolicy,
    CompatibilityPolicy,
    FilePolicy,
    GatherPolicy,
    GradientPolicy,
    LoggingPolicy,
    LossScalePolicy,
    OptimizerOffload,
    OptimizerPolicy,
    OptimizerSees,
    ParameterOffload,
    PrecisionPolicy,
    Provenance,
    Resolved,
    SchedulerPolicy,
    ZeroPolicy,
)
from hf_zero.config.reading.load import load_config
from hf_zero.config.resolve import (
    Findings,
    examine,
    resolve,
    resolve_compression,
    resolve_offload,
    resolve_precision,
)
from hf_zero.config.sources import ConfigDict, Source
from hf_zero.config.views import AcceleratorView, Given, ModelView, TrainingView, Views

__all__ = [
    "AcceleratorView",
    "AutocastPolicy",
    "BatchPolicy",
    "CheckpointPolicy",
    "CompatibilityPolicy",
    "CompressionPolicy",
    "ConfigDict",
    "ConfigError",
    "FilePolicy",
    "Findings",
    "Given",
    "GatherPolicy",
    "GradientPolicy",
    "LoggingPolicy",
    "LossScalePolicy",
    "ModelView",
    "OptimizerOffload",
    "OptimizerPolicy",
    "OptimizerSees",
    "Other",
    "ParameterOffload",
    "PrecisionPolicy",
    "Problem",
    "Provenance",
    "Resolved",
    "SchedulerPolicy",
    "Source",
    "TrainingView",
    "Views",
    "ZeroPolicy",
    "examine",
    "load_config",
    "resolve",
    "resolve_compression",
    "resolve_offload",
    "resolve_precision",
]
