"""deepspeed.zero: building, reading and gathering sharded parameters."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "GatheredParameters": "hf_zero.zero.gathered.GatheredParameters",
        "Init": "hf_zero.zero.init_context.Init",
        "ZeroParamStatus": "hf_zero.zero.sharded_parameter.ZeroParamStatus",
        "ZeroParamType": "hf_zero.zero.sharded_parameter.ZeroParamType",
        "register_external_parameter": "hf_zero.zero.external.register_external_parameter",
        "unregister_external_parameter": "hf_zero.zero.external.unregister_external_parameter",
        "unwrap_model_for_generation": "hf_zero.zero.generation.unwrap_model_for_generation",
    },
)
