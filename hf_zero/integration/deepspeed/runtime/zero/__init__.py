"""deepspeed.runtime.zero: names that pickled checkpoints refer to."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(__name__, {}, submodules=("config", "offload_config", "partition_parameters"))
