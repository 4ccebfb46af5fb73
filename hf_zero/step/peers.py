"""What an optimizer may ask of the other ranks in the middle of its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives
from hf_zero.comm.parts import held_part
from hf_zero.layout.buckets import Slot
from hf_zero.optim import Peers, SubGroup
from hf_zero.optim.updater import Spread
from hf_zero.params.store import ParameterStore


def peers_of(
    store: ParameterStore, collectives: Collectives, group_of: Callable[[Tensor], Collectives] | None = None
) -> Peers:
    """Sums of small tensors, and whole tensors out of shards.

    Args:
        collectives: the ranks that hold shards of the same states; this one alone where each owns whole buckets.
        group_of: those of a parameter, where they are not always the same.
    """

    def ranks_of(sub_group: SubGroup) -> Collectives:
        return collectives if group_of is None else group_of(store.buckets[sub_group.bucket].parameters[0])

    def gather_whole(sub_group: SubGroup, values: Tensor) -> dict[int, Tensor]:
        collectives, length = ranks_of(sub_group), values.numel()
        everyone = torch.empty(collectives.size * length, dtype=values.dtype, device=store.device)
        everyone.narrow(0, collectives.rank * length, length).copy_(values)
        collectives.all_gather(everyone).wait()
        return _wholes(store, sub_group, everyone.to(values.device))

    def add_up(values: Tensor) -> None:
        travelling = values.to(store.device)
        collectives.sum_small(travelling)
        if travelling is not values:
            values.copy_(travelling)

    def scatter_whole(sub_group: SubGroup, wholes: Mapping[int, Tensor]) -> Tensor:
        collectives, length, dtype = ranks_of(sub_group), sub_group.part.numel, sub_group.master.dtype
        everyone = torch.zeros(collectives.size * length, dtype=dtype, device=store.device)
        for slot, place in _places(store, sub_group, everyone):
            if slot.parameter in wholes:
                flat = wholes[slot.parameter].to(everyone.device, dtype).reshape(-1)
                place.copy_(nn.functional.pad(flat, (0, place.numel() - slot.numel)).view(place.shape))
        mine = torch.empty(length, dtype=dtype, device=store.device)
        collectives.reduce_scatter(mine, everyone).wait()
        return mine.to(sub_group.master.device)

    return Peers(
        rank=collectives.rank,
        world=collectives.size,
        add_up=add_up,
        gather_whole=gather_whole,
        scatter_whole=scatter_whole,
        members=lambda sub_group: [slot.parameter for slot in _slots(store, sub_group)],
        spread=lambda: spread_of(store),
        part_of=lambda parameter: held_part(store.parameters[parameter]),
    )


def spread_of(store: ParameterStore) -> list[Spread]:
    """Where every parameter of the layout is cut."""
    cuts: list[list[int]] = [[] for _ in store.parameters]
    for trained in store.buckets:
        for rank in range(trained.bucket.world):
            for piece in trained.bucket.pieces(trained.bucket.shard(rank)):
                if piece.in_parameter:
                    cuts[piece.parameter].append(piece.in_parameter)
    return [
        Spread(tuple(parameter.shape), tuple(sorted(mine)))
        for parameter, mine in zip(store.parameters, cuts, strict=True)
    ]


def _wholes(store: ParameterStore, sub_group: SubGroup, everyone: Tensor) -> dict[int, Tensor]:
    return {
        slot.parameter: place.reshape(-1)[: slot.numel].view(store.parameters[slot.parameter].shape)
        for slot, place in _places(store, sub_group, everyone)
    }


def _slots(store: ParameterStore, sub_group: SubGroup) -> list[Slot]:
    """Of the sub-group's own optimizer group, where a bucket holds several."""
    bucket = store.buckets[sub_group.bucket].bucket
    return [
        slot
        for slot in bucket.slots
        if not bucket.by_rows or 0 <= slot.offset - sub_group.part.start < sub_group.part.numel
    ]


def _places(store: ParameterStore, sub_group: SubGroup, everyone: Tensor) -> Iterator[tuple[Slot, Tensor]]:
    """Where each parameter of the sub-group lies in what all ranks have of it: a view, with padding at its end."""
    bucket = store.buckets[sub_group.bucket].bucket
    rows = everyone.view(bucket.world, -1)
    for slot in _slots(store, sub_group):
        start = slot.offset - sub_group.part.start
        if bucket.by_rows:
            yield slot, rows[:, start : start + bucket.chunk(slot)]
        else:
            yield slot, everyone.narrow(0, slot.offset, slot.numel)
