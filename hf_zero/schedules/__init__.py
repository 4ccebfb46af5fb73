"""Learning-rate schedules by the names that a config uses."""

from hf_zero.schedules.cycles import LRRangeTest, OneCycle
from hf_zero.schedules.registry import VALID_LR_SCHEDULES, build_scheduler
from hf_zero.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = [
    "VALID_LR_SCHEDULES",
    "LRRangeTest",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "build_scheduler",
]
