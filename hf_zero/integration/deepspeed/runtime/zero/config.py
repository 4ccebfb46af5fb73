"""deepspeed.runtime.zero.config: the stage as optimizer files hold it."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {"ZeroStageEnum": "hf_zero.checkpoint.inert.ZeroStageEnum"})
