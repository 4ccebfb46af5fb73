"""Engines of ranks that believe to be on machines of their own, for campaigns: no shared memory between them."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from torch import nn, optim

from hf_zero.comm import groups
from hf_zero.comm.cpu import shared_memory
from tests.hostile.body import make_zero_engine


def make_engine_apart(model: nn.Module, optimizer: optim.Optimizer, config: dict[str, Any]) -> Any:
    """What `make_zero_engine` makes, where every rank has a machine of its own."""
    if any(known.hosts.num_hosts == 1 for known in groups._worlds.values()):
        groups._worlds.clear()  # that of the ranks' warming up
    with mock.patch.object(shared_memory, "host_name", lambda: f"host {os.environ['RANK']}"):
        return make_zero_engine(model, optimizer, config)
