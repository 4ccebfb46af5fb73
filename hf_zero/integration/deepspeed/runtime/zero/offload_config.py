"""deepspeed.runtime.zero.offload_config: what can be sent where."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "OffloadStateTypeEnum": "hf_zero.zero.relief.OffloadStateTypeEnum",
        "OffloadDeviceEnum": "hf_zero.zero.relief.OffloadDeviceEnum",
    },
)
