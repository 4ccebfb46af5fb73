"""One simulated rank of a large world: the real engine on meta tensors, with collectives that only count.

    with simulated_world(rank=511, world=1024) as world:
        engine = world.engine(model, config)       # the model on the meta device
        step(engine)
        ledger.tallies, live_bytes()

Nothing is computed and no memory is used, so the model and the world may have any size. Everything that all ranks do
alike can be observed on one of them, which is everything that the engine does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hf_zero import initialize
from hf_zero.api import entry
from hf_zero.comm import Channel, Collectives, Hosts, ParallelGroups, Pending, Rows, ledger
from hf_zero.comm.negotiation.lockstep import LockstepNegotiation
from hf_zero.comm.process_group import Process
from hf_zero.comm.rows import DirectRows, FlatRows, own_shard
from hf_zero.device.registry import HostCopy
from tests.support.groups import plain

META = torch.device("meta")


class SimulatedCollectives(Collectives):
    """Records every call in the ledger and moves no data."""

    moves_pieces = True

    def gather_objects(self, value: object) -> list[object]:
        return [value] * self.size

    def _all_reduce(self, flat: Tensor) -> Pending:
        assert flat.is_meta
        return Pending()

    def _reduce_scatter(self, shard: Tensor, flat: Tensor) -> Pending:
        assert flat.is_meta and shard.numel() * self.size == flat.numel()
        return Pending()

    def _all_gather(self, flat: Tensor) -> Pending:
        assert flat.is_meta and flat.numel() % self.size == 0
        return Pending()

    def _gather_pieces(self, pieces: Any, wholes: Any, buffer: Tensor | None = None) -> Rows:
        numels = [piece.numel() for piece in pieces]
        assert [whole.numel() for whole in wholes] == [numel * self.size for numel in numels]
        own = [whole.narrow(0, self.rank * numel, numel) for whole, numel in zip(wholes, numels, strict=True)]
        torch._foreach_copy_(own, list(pieces))
        return DirectRows(buffer, Pending())

    def _reduce_scatter_pieces(self, shards: Any, wholes: Any) -> Pending:
        assert [whole.numel() for whole in wholes] == [shard.numel() * self.size for shard in shards]
        return Pending()

    def _all_to_all(self, received: Any, sent: Any) -> None:
        return None

    def _exchange_rows(self, flat: Tensor, take: Any) -> Rows:
        assert flat.is_meta and flat.numel() % self.size == 0
        return FlatRows(None, flat, self.size, Pending())

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        return None

    def _sum_small(self, values: Tensor) -> None:
        return None

    def _sum_with_facts(self, values: Tensor, facts: Sequence[float]) -> list[float]:
        return list(facts)


class AlikeHosts(SimulatedCollectives):
    """Collectives in host memory: all ranks send what this one sends."""

    def _all_gather(self, flat: Tensor) -> Pending:
        flat.view(self.size, -1).copy_(own_shard(flat, self.rank, self.size).clone())
        return Pending()


@dataclass(frozen=True)
class SimulatedWorld:
    """One rank's view of it."""

    rank: int
    world: int

    def engine(self, model: nn.Module, config: Mapping[str, Any]) -> Any:
        """`initialize` for a model on the meta device."""
        return initialize(model=model, config=dict(config), dist_init_required=False)[0]


@contextmanager
def simulated_world(rank: int, world: int, *, negotiates: bool = False) -> Iterator[SimulatedWorld]:
    """Engines created inside belong to `rank` of `world`.

    Args:
        negotiates: hosts tell each other what ranks on accelerators do; otherwise all ranks are known to do the same.
    """

    def parallel_groups(_device: torch.device, *_sizes: object, **_options: bool) -> ParallelGroups:
        channels = {channel: SimulatedCollectives(rank, world) for channel in Channel}
        if negotiates:
            gathers, hosts = channels[Channel.GATHER], AlikeHosts(rank, world)
            gathers.negotiation = LockstepNegotiation(gathers, hosts)
        return plain(channels)

    with ExitStack() as stack:
        for module, name, stand_in in (
            (entry, "this_process", lambda: Process(rank, world)),
            (entry, "hosts", lambda: Hosts.one(world)),
            (entry, "parallel_groups", parallel_groups),
            (entry, "local_device", lambda: META),
        ):
            stack.enter_context(mock.patch.object(module, name, stand_in))
        # The only place where the engine reads a number from a tensor.
        stack.enter_context(mock.patch.object(HostCopy, "read", lambda _copy: [1.0, 0.0]))
        ledger.reset()
        yield SimulatedWorld(rank, world)


def live_bytes() -> int:
    """Bytes that all live meta tensors would need, each storage once."""
    gc.collect()
    storages = {}
    for tensor in gc.get_objects():
        if type(tensor) in (Tensor, nn.Parameter) and tensor.is_meta:  # isinstance would initialize lazy modules
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())
