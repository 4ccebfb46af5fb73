"""deepspeed.runtime.zero.partition_parameters: zero.Init and what its callers touch beside it."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "GatheredParameters": "hf_zero.zero.gathered.GatheredParameters",
        "Init": "hf_zero.zero.init_context.Init",
        "ZeroParamStatus": "hf_zero.zero.sharded_parameter.ZeroParamStatus",
        "ZeroParamType": "hf_zero.zero.sharded_parameter.ZeroParamType",
        "_orig_torch_arange": "hf_zero.integration.constructors.torch_arange",
        "get_accelerator": "hf_zero.integration.accelerator.get_accelerator",
        "register_external_parameter": "hf_zero.zero.external.register_external_parameter",
        "unregister_external_parameter": "hf_zero.zero.external.unregister_external_parameter",
        "zero_wrapper_for_fp_tensor_constructor": "hf_zero.integration.constructors.unchanged_constructor",
    },
)
