"""deepspeed.ops.lion: Lion."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

_NAMES = ("DeepSpeedCPULion", "FusedLion")

__getattr__, __dir__ = lazy_names(__name__, {name: f"hf_zero.optim.{name}" for name in _NAMES})
