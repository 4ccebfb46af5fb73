"""deepspeed.accelerator: the device this process trains on."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {"get_accelerator": "hf_zero.integration.accelerator.get_accelerator"})
