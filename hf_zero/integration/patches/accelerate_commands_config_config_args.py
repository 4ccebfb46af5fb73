"""accelerate.commands.config.config_args: `use_hf_zero: true` in the config file of `accelerate launch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.config import ConfigError, Problem
from hf_zero.integration.patches import Patches
from hf_zero.integration.patches.accelerate_commands_launch import KEY, NO_FLAG, NO_NEED, is_true

PATCHES = Patches("accelerate.commands.config.config_args")
_OTHER_TYPES = ("FSDP", "MEGATRON_LM", "XLA", "TP")


@PATCHES.add("BaseConfig.process_config(config_dict)", without=NO_FLAG, until=NO_NEED)
def around_process_config(
    original: Callable[[dict[str, Any]], dict[str, Any]], config_dict: dict[str, Any]
) -> dict[str, Any]:
    """Where accelerate's own settings for DeepSpeed are, the key travels with them."""
    if is_true(config_dict.pop(KEY, False)):
        kind = config_dict.get("distributed_type", "DEEPSPEED")
        if kind in _OTHER_TYPES:
            rule = f"{KEY}: true is a way to train of its own"
            raise ConfigError(Problem("distributed_type", str(kind), rule, f"write DEEPSPEED, or drop {KEY}"))
        config_dict["distributed_type"] = "DEEPSPEED"
        config_dict["deepspeed_config"] = {**(config_dict.get("deepspeed_config") or {}), KEY: True}
    return original(config_dict)
