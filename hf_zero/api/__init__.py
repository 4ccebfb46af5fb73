"""The public API: `initialize`, the engine with DeepSpeed's names, and access to whole values of sharded parameters."""

from __future__ import annotations

import sys

from hf_zero.log import logger

if sys.platform == "win32":
    raise ImportError("hf_zero needs a POSIX system (shared memory, limits of memory): use it under Linux or WSL2")
if sys.platform != "linux":
    logger.warning("hf_zero is only tested on Linux; it is untested on %s", sys.platform)
