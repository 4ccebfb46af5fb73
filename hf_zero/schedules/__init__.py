"""Learning-rate schedules by the names that a config uses."""
# ruff: noqa: F401  (what other packages import from here)

from hf_zero.schedules.cycles import LRRangeTest, OneCycle
from hf_zero.schedules.registry import VALID_LR_SCHEDULES, build_scheduler
from hf_zero.schedules.warmup import WarmupCosineLR, WarmupDecayLR, WarmupLR
