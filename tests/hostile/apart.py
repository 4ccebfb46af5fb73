"""Engines for campaigns whose ranks appear to be on separate machines, without shared memory."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from torch import nn, optim

from hf_zero.comm import groups
from hf_zero.comm.cpu import shared_memory
from tests.hostile.body import make_zero_engine


def make_engine_apart(model: nn.Module, optimizer: optim.Optimizer, config: dict[str, Any]) -> Any:
    """Like `make_zero_engine`, with each rank on a separate machine."""
    if any(known.hosts.num_hosts == 1 for known in groups._worlds.values()):
        groups._worlds.clear()  # from the ranks' warm-up
    with mock.patch.object(shared_memory, "host_name", lambda: f"host {os.environ['RANK']}"):
        return make_zero_engine(model, optimizer, config)
