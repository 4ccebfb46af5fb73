"""Ranks on the late device whose gathers are also late: tests an accelerator's gather lane.

Gathers run over gloo when they are requested, and arrive when somebody has waited for them (`tests.support.late`).
Everything else is as between hosts without accelerators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm import Channel, known_groups
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.cpu import shared_memory
from hf_zero.comm.process_group import get_rank
from hf_zero.comm.torch_backend import GatherStreamCollectives
from hf_zero.device.registry import runtime_of
from tests.support.late import Late, use


class LateGathers(GatherStreamCollectives):
    """Collectives of ranks that are processes."""

    def _gather_into(self, flat: Tensor, row: Tensor) -> None:
        values = torch.empty_like(flat)
        dist.all_gather_into_tensor(values, row.clone(), group=self._group)
        runtime = runtime_of(row.device)
        assert isinstance(runtime, Late)
        runtime.gather(row, flat, values)

    def _gather_each_into(self, wholes: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
        values, runtime = [torch.empty_like(whole) for whole in wholes], runtime_of(wholes[0].device)
        super()._gather_each_into(values, [piece.clone() for piece in pieces])
        assert isinstance(runtime, Late)
        for piece, whole, value in zip(pieces, wholes, values, strict=True):
            runtime.gather(piece, whole, value)


@contextmanager
def late_gathers(runtime: Late, num_beside: int = 1) -> Iterator[None]:
    """Engines created inside run on `runtime`, with `num_beside` ranks on a host."""
    usual = known_groups.KnownGroups.collectives

    def collectives(known: Any, device: torch.device, channel: Channel, ranks: Any, number: int) -> Collectives:
        if channel is Channel.GATHER:
            found: Collectives = LateGathers(known.native_group(number, channel))
        else:
            found = usual(known, device, channel, ranks, number)
        found.moves_pieces = True  # as on an accelerator
        return found

    with (
        use(runtime),
        mock.patch.object(shared_memory, "host_name", lambda: f"host {get_rank() // num_beside}"),
        mock.patch.object(known_groups.KnownGroups, "collectives", collectives),
    ):
        yield
