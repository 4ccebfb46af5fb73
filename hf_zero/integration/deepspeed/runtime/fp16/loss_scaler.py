"""deepspeed.runtime.fp16.loss_scaler: loss scalers as optimizer files hold them."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "DynamicLossScaler": "hf_zero.checkpoint.inert.DynamicLossScaler",
        "LossScaler": "hf_zero.checkpoint.inert.LossScaler",
    },
)
