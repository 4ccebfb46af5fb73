"""What an optimizer may ask of the other ranks in the middle of its step."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.comm import Collectives
from hf_zero.optim import MasterShard, Peers
from hf_zero.zero.store import ParameterStore


def peers_of(store: ParameterStore, collectives: Collectives) -> Peers:
    """Sums of small tensors, and whole tensors out of shards."""

    def gather_whole(shard: MasterShard, values: Tensor) -> dict[int, Tensor]:
        length = values.numel()
        everyone = torch.empty(collectives.world * length, dtype=values.dtype, device=store.device)
        everyone.narrow(0, collectives.rank * length, length).copy_(values)
        collectives.all_gather(everyone).wait()
        return _wholes(store, shard, everyone.to(values.device))

    def add_up(values: Tensor) -> None:
        travelling = values.to(store.device)
        collectives.agree(travelling)
        if travelling is not values:
            values.copy_(travelling)

    return Peers(add_up=add_up, gather_whole=gather_whole)


def _wholes(store: ParameterStore, shard: MasterShard, everyone: Tensor) -> dict[int, Tensor]:
    bucket = store.buckets[shard.bucket].bucket
    rows = everyone.view(bucket.world, -1)
    found = {}
    for slot in bucket.slots:
        start = slot.offset - shard.part.start
        if bucket.by_rows:
            if not 0 <= start < shard.part.numel:
                continue  # of another group in the same bucket
            flat = rows[:, start : start + bucket.chunk(slot)].reshape(-1)[: slot.numel]
        else:
            flat = everyone.narrow(0, slot.offset, slot.numel)
        found[slot.parameter] = flat.view(store.parameters[slot.parameter].shape)
    return found
