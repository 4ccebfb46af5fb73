"""deepspeed.runtime.lr_schedules: the learning-rate schedules of ds.json."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

_SCHEDULES = ("VALID_LR_SCHEDULES", "LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR")
_FLAGS = ("add_tuning_arguments", "get_config_from_args", "get_lr_from_config", "parse_arguments")

__getattr__, __dir__ = lazy_names(
    __name__,
    {name: f"hf_zero.schedules.{name}" for name in _SCHEDULES}
    | {name: f"hf_zero.integration.tuning.{name}" for name in _FLAGS},
)
