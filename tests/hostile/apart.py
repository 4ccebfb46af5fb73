"""Engines of ranks that believe to be on machines of their own, for campaigns: no shared memory between them."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from torch import nn, optim

from hf_zero.comm import channels
from hf_zero.comm.cpu import meeting
from tests.hostile.body import make_zero_engine


def make_engine_apart(model: nn.Module, optimizer: optim.Optimizer, config: dict[str, Any]) -> Any:
    """What `make_zero_engine` makes, where every rank has a machine of its own."""
    if any(known.hosts.num_hosts == 1 for known in channels._worlds.values()):
        channels._worlds.clear()  # that of the ranks' warming up
    with mock.patch.object(meeting, "host_name", lambda: f"host {os.environ['RANK']}"):
        return make_zero_engine(model, optimizer, config)
