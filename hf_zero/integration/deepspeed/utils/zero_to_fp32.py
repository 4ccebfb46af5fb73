"""deepspeed.utils.zero_to_fp32: full weights from sharded checkpoints."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

_NAMES = (
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
)

__getattr__, __dir__ = lazy_names(__name__, {name: f"hf_zero.checkpoint.fp32.{name}" for name in _NAMES})
