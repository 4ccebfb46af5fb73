"""deepspeed.runtime.utils: helpers seen in training scripts."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {"see_memory_usage": "hf_zero.integration.helpers.see_memory_usage"})
