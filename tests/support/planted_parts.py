"""Planted parts of the GPU programme (tests/test_gpu_programme.py). This module imports no torch by itself."""

from __future__ import annotations

import os
import signal
import time

from bench.gpu_programme import Found, NotHere, Place


def planted(case: str, place: Place) -> Found:
    if case == "hangs":
        time.sleep(600)
    if case == "raises":
        raise ValueError("a planted error")
    if case == "rank 1 raises" and os.environ.get("RANK") == "1":
        raise ValueError("a planted error of rank 1")
    if case == "rank 1 raises":
        time.sleep(600)
    if case == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if case == "is not here":
        raise NotHere("nothing to see")
    return Found("42.0", case != "differs", 42.0, {"facts": {"device": "a planted one"}})


def without_waits(case: str, place: Place) -> Found:
    """Block 1's check of delayed collectives, in an engine that waits for none of them."""
    from unittest import mock

    from bench import gpu_device, gpu_nccl

    with mock.patch.object(gpu_device.Deferred, "wait", lambda self: None):
        return gpu_nccl.alone(case, place)
