"""Engines for campaigns whose ranks appear to be on separate machines, without shared memory, also on late devices."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any
from unittest import mock

from torch import nn, optim

from hf_zero.comm import groups
from hf_zero.comm.cpu import shared_memory
from hf_zero.layout import buckets
from tests.hostile.body import make_zero_engine
from tests.support.late import Late
from tests.support.late_gathers import late_gathers


def make_engine_apart(model: nn.Module, optimizer: optim.Optimizer, config: dict[str, Any]) -> Any:
    """Like `make_zero_engine`, with each rank, or the pairs of `zero_hpz_partition_size`, on a separate machine."""
    beside = _on_a_host(config)
    with mock.patch.object(shared_memory, "host_name", lambda: f"host {int(os.environ['RANK']) // beside}"):
        return make_zero_engine(model, optimizer, config)


_device = ExitStack()


def make_engine_late(model: nn.Module, optimizer: optim.Optimizer, config: dict[str, Any]) -> Any:
    """Like `make_engine_apart`, on a device whose copies and gathers come as late as they may, until the next call."""
    _device.close()
    beside = _on_a_host(config)
    _device.enter_context(late_gathers(Late(), beside))
    _device.enter_context(mock.patch.object(buckets, "MIN_DIRECT_BYTES", 0))
    return make_zero_engine(model, optimizer, config)


def _on_a_host(config: dict[str, Any]) -> int:
    """Number of ranks on a machine."""
    beside: int = config["zero_optimization"].get("zero_hpz_partition_size", 1)
    wanted = int(os.environ["WORLD_SIZE"]) // beside
    if any(known.hosts.num_hosts != wanted for known in groups._worlds.values()):
        groups._worlds.clear()  # from the ranks' warm-up, or of other hosts
    return beside
