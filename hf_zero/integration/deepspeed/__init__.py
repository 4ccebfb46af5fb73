"""The package that `import deepspeed` finds: names only, each loaded from hf_zero on first use."""

from __future__ import annotations

from hf_zero.integration.alias import VERSION as __version__
from hf_zero.integration.alias import lazy_names

__all__ = ["__version__"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "DeepSpeedEngine": "hf_zero.engine.ZeroEngine",
        "OnDevice": "hf_zero.integration.helpers.OnDevice",
        "add_config_arguments": "hf_zero.integration.arguments.add_config_arguments",
        "add_tuning_arguments": "hf_zero.integration.tuning.add_tuning_arguments",
        "init_distributed": "hf_zero.comm.init_distributed",
        "initialize": "hf_zero.entry.initialize",
        "log_dist": "hf_zero.log.log_dist",
        "logger": "hf_zero.log.logger",
    },
    submodules=("accelerator", "checkpoint", "comm", "launcher", "ops", "runtime", "utils", "zero"),
)
