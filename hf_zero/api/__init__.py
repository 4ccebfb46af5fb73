"""The API for programs: initialize, the engine with its surface, and whole values of sharded parameters."""

from __future__ import annotations

import sys

from hf_zero.log import logger

if sys.platform == "win32":
    raise ImportError("hf_zero needs a POSIX system (shared memory, limits of memory): use it under Linux or WSL2")
if sys.platform != "linux":
    logger.warning("hf_zero is tested on Linux alone; it is untested on %s", sys.platform)
