"""Presents the owned master weights to an optimizer."""

from __future__ import annotations

from torch import nn

from hf_zero.layout import Interval
from hf_zero.layout.sub_groups import pieces_of_sub_group
from hf_zero.offload.placement import StoredSubGroup
from hf_zero.offload.vector import at_hand_or_absent
from hf_zero.optim import MasterTensor, SubGroup
from hf_zero.params.store import ParameterStore, TrainedBucket


def sub_groups_of(store: ParameterStore, *, whole_tensors: bool) -> tuple[SubGroup, ...]:
    """One per sub-group of the update, in bucket order.

    Args:
        whole_tensors: give the optimizer every parameter in its own shape (possible only where a rank owns whole
            buckets); otherwise it sees one flat tensor per sub-group.
    """
    return tuple(
        _sub_group(index, bucket, sub_group, whole_tensors)
        for index, bucket in enumerate(store.buckets)
        for sub_group in bucket.sub_groups
    )


def _sub_group(index: int, bucket: TrainedBucket, sub_group: StoredSubGroup, whole_tensors: bool) -> SubGroup:
    part = sub_group.part
    master = at_hand_or_absent(sub_group.master)
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
    return SubGroup(
        bucket=index,
        part=part,
        group=sub_group.group,
        master=master,
        lp_param=None if sub_group.lp_param is None else at_hand_or_absent(sub_group.lp_param),
        tensors=tensors,
        pieces=pieces_of_sub_group(bucket.bucket, bucket.owned, part),
    )
