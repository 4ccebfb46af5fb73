"""deepspeed.runtime: the engine, the learning-rate schedules, helpers."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {}, submodules=("engine", "fp16", "lr_schedules", "utils", "zero"))
