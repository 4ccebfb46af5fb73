"""Presents the owned master weights to an optimizer."""

from __future__ import annotations

from torch import nn

from hf_zero.layout import Interval
from hf_zero.layout.portions import pieces_of_portion
from hf_zero.offload.placement import Portion
from hf_zero.offload.vector import at_hand_or_absent
from hf_zero.optim import MasterShard, MasterTensor
from hf_zero.params.store import ParameterStore, TrainedBucket


def master_shards(store: ParameterStore, *, whole_tensors: bool) -> tuple[MasterShard, ...]:
    """One shard per portion of the update, in bucket order.

    Args:
        whole_tensors: give the optimizer every parameter in its own shape (possible only where a rank owns whole
            buckets); otherwise it sees one flat tensor per shard.
    """
    return tuple(
        _shard(index, bucket, portion, whole_tensors)
        for index, bucket in enumerate(store.buckets)
        for portion in bucket.portions
    )


def _shard(index: int, bucket: TrainedBucket, portion: Portion, whole_tensors: bool) -> MasterShard:
    part = portion.part
    master = at_hand_or_absent(portion.master)
    if whole_tensors:
        assert part.numel == bucket.bucket.numel, "whole tensors need whole buckets"
        tensors = tuple(
            MasterTensor(
                nn.Parameter(master.narrow(0, slot.offset, slot.numel).view(parameter.shape)),
                slot.interval,
                whole=slot.parameter,
            )
            for slot, parameter in zip(bucket.bucket.slots, bucket.parameters, strict=True)
        )
    else:
        tensors = (MasterTensor(nn.Parameter(master), Interval(0, part.numel)),)
    return MasterShard(
        bucket=index,
        part=part,
        group=portion.group,
        master=master,
        narrow=None if portion.narrow is None else at_hand_or_absent(portion.narrow),
        tensors=tensors,
        pieces=pieces_of_portion(bucket.bucket, bucket.owned, part),
    )
