"""deepspeed.checkpoint.constants: the keys that the zero_to_fp32.py of DeepSpeed's checkpoint folders asks for."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

_HOME = "hf_zero.checkpoint.deepspeed_format"
_NAMES = (
    "AUTOEP_LAYERS_KEY",
    "AUTOEP_LAYERS_KEY_LEGACY",
    "AUTOEP_ZERO3_EXPERT_STATE_FORMAT_KEY",
    "AUTOEP_ZERO3_PARTITIONED_EXPERT_STATE_FORMAT",
    "BUFFER_NAMES",
    "DS_VERSION",
    "FP32_FLAT_GROUPS",
    "FROZEN_PARAM_FRAGMENTS",
    "FROZEN_PARAM_SHAPES",
    "OPTIMIZER_STATE_DICT",
    "PARAM_SHAPES",
    "PARTITION_COUNT",
    "ZERO_STAGE",
)

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        **{name: f"{_HOME}.{name}" for name in _NAMES},
        "PARAM_ALIGNMENT_PADDINGS": f"{_HOME}.ALIGNMENT_PADDINGS",
        "SINGLE_PARTITION_OF_FP32_GROUPS": f"{_HOME}.FP32_PARTITIONS",
    },
)
