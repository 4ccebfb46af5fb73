"""Sums over replicas of a shard: once per update, and again if more gradients follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_zero.comm import Pending
from hf_zero.comm.collectives import LoneCollectives
from hf_zero.grads.bucket import BucketGradients, GradientDtypes
from hf_zero.grads.replicas import ReplicaSums
from hf_zero.layout import ParameterSpec, plan_layout
from hf_zero.layout.sharding import Sharding
from hf_zero.offload.placement import Placements, in_memory_placement
from hf_zero.params.flat import FlatParameters
from hf_zero.precision import Precision
from tests.support.groups import groups_of

CPU = torch.device("cpu")


class Copies(LoneCollectives):
    """The given number of replicas; every other replica adds 10 to each element."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.sent: list[Tensor] = []

    def _all_reduce(self, flat: Tensor) -> Pending:
        assert flat.numel() % self.size == 0
        self.sent.append(flat.clone())
        flat.add_(10.0 * (self.size - 1))
        return Pending()


def buckets(communication: torch.dtype) -> tuple[BucketGradients, ...]:
    parameters = [nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(5))]
    specs = [ParameterSpec(f"p{i}", p.numel(), 0, "float32") for i, p in enumerate(parameters)]
    layout, placements = plan_layout(specs, world=1, bucket_numel=6), Placements(CPU, in_memory_placement(CPU))
    sharding = Sharding(stage=0, rank=0, world=1)
    store = FlatParameters(layout, parameters, sharding, groups_of(), placements, Precision(None, None, None))
    dtypes, lone = GradientDtypes(communication, torch.float32), LoneCollectives()
    return tuple(BucketGradients(each, dtypes, lone) for each in store.buckets)


@pytest.mark.parametrize("communication", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_each_bucket_is_summed_once_until_more_comes(size: int, communication: torch.dtype) -> None:
    copies, found = Copies(size), buckets(communication)
    sums = ReplicaSums(found, copies, is_first=True)
    for bucket in found:
        sums.about_to_add(bucket)
        bucket.reduced.add(torch.ones(bucket.trained.owned.numel))
    sums.sum()
    sums.sum()
    assert len(copies.sent) == len(found) and all(sent.dtype == communication for sent in copies.sent)
    total = 1.0 + 10 * (size - 1)
    for bucket in found:
        with bucket.reduced.opened() as values:
            assert values.eq(total).all()
    sums.about_to_add(found[0])
    found[0].reduced.add(torch.ones(found[0].trained.owned.numel))
    sums.sum()
    assert len(copies.sent) == len(found) + 1
    with found[0].reduced.opened() as values:  # the first replica keeps the sum, and sends it with the new gradients
        assert values.eq(total + 1 + 10 * (size - 1)).all()


def test_other_copies_begin_again_at_zero() -> None:
    copies, (bucket, *_) = Copies(2), buckets(torch.float32)
    sums = ReplicaSums([bucket], copies, is_first=False)
    bucket.reduced.add(torch.ones(bucket.trained.owned.numel))
    sums.sum()
    sums.about_to_add(bucket)
    bucket.reduced.add(torch.full((bucket.trained.owned.numel,), 3.0))
    sums.sum()
    assert copies.sent[1].eq(3.0).all()
    sums.clear()
    sums.sum()
    assert len(copies.sent) == 3
