"""deepspeed.comm: our process group calls, and the rest of torch.distributed under the same names."""

from __future__ import annotations

from hf_zero.comm import (
    barrier,
    destroy_process_group,
    get_local_rank,
    get_rank,
    get_world_size,
    init_distributed,
    is_initialized,
)
from hf_zero.comm.mirror import *  # noqa: F403
from hf_zero.comm.mirror import __all__ as _mirrored
from hf_zero.integration.alias import lazy_names
from hf_zero.integration.helpers import log_summary

__all__ = [
    "barrier",
    "destroy_process_group",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "init_distributed",
    "is_initialized",
    "log_summary",
]
__all__ += _mirrored

__getattr__, __dir__ = lazy_names(__name__, {})
