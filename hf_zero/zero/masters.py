"""Presents the owned master weights to an optimizer."""

from __future__ import annotations

from torch import nn

from hf_zero.layout import Interval, Piece
from hf_zero.optim import MasterShard, MasterTensor
from hf_zero.zero.store import ParameterStore, TrainedBucket


def master_shards(store: ParameterStore, *, whole_tensors: bool) -> tuple[MasterShard, ...]:
    """One shard per bucket and optimizer group, in bucket order.

    Args:
        whole_tensors: give the optimizer every parameter in its own shape (possible only where a rank owns whole
            buckets); otherwise it sees one flat tensor per shard.
    """
    return tuple(
        _shard(index, bucket, run, whole_tensors)
        for index, bucket in enumerate(store.buckets)
        for run in range(len(bucket.bucket.runs))
    )


def _shard(index: int, bucket: TrainedBucket, run: int, whole_tensors: bool) -> MasterShard:
    runs = bucket.bucket.runs
    stop = runs[run + 1].start if run + 1 < len(runs) else bucket.owned.numel
    part = Interval(runs[run].start, stop)
    master = bucket.master.narrow(0, part.start, part.numel)
    if whole_tensors:
        assert bucket.owned.numel == bucket.bucket.numel and len(runs) == 1, "whole tensors need whole buckets"
        tensors = tuple(
            MasterTensor(nn.Parameter(master.narrow(0, slot.offset, slot.numel).view(parameter.shape)), slot.interval)
            for slot, parameter in zip(bucket.bucket.slots, bucket.parameters, strict=True)
        )
    else:
        tensors = (MasterTensor(nn.Parameter(master), Interval(0, part.numel)),)
    return MasterShard(
        bucket=index,
        part=part,
        group=runs[run].group,
        master=master,
        narrow=None if bucket.narrow is None else bucket.narrow.narrow(0, part.start, part.numel),
        tensors=tensors,
        pieces=_pieces(bucket, part),
    )


def _pieces(bucket: TrainedBucket, part: Interval) -> tuple[Piece, ...]:
    return tuple(
        Piece(piece.parameter, piece.in_shard - part.start, piece.in_parameter, piece.numel)
        for piece in bucket.bucket.pieces(bucket.owned)
        if part.start <= piece.in_shard < part.stop
    )
