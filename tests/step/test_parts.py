"""Small parts of the step, each alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_zero.comm.collectives import LoneCollectives
from hf_zero.layout import ParameterSpec, plan_layout
from hf_zero.layout.sharding import Sharding
from hf_zero.offload.placement import Placements, in_memory_placement
from hf_zero.params.flat import FlatParameters
from hf_zero.precision import Precision
from hf_zero.step.agreement import listed, refuse_unused
from hf_zero.step.loss_factors import refuse_minimum_loss_scale
from hf_zero.step.peers import peers_of, spread_of

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def store(dtype: torch.dtype = torch.float32, *, whole_tensors: bool = False) -> FlatParameters:
    """Two parameters of a world of one, in one bucket."""
    parameters = [nn.Parameter(torch.arange(6.0).view(2, 3).to(dtype)), nn.Parameter(torch.ones(4, dtype=dtype))]
    name = str(dtype).removeprefix("torch.")
    specs = [ParameterSpec(f"p{i}", p.numel(), 0, name) for i, p in enumerate(parameters)]
    return FlatParameters(
        plan_layout(specs, world=1, bucket_numel=1000),
        parameters,
        Sharding(stage=0, rank=0, world=1),
        LoneCollectives(),
        Placements(CPU, in_memory_placement(CPU)),
        Precision(None, None, None),
        whole_tensors=whole_tensors,
    )


def test_flat_parameters_are_views_of_one_buffer() -> None:
    flat = store()
    (bucket,) = flat.buckets
    first, second = flat.parameters
    assert second.data_ptr() == first.data_ptr() + 32 * 4 and first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not bucket.has_masters


def test_what_is_written_into_a_parameter_reaches_its_master_once() -> None:
    flat = store(BF16)
    (bucket,) = flat.buckets
    master = bucket.sub_groups[0].master
    assert bucket.has_masters and master.dtype == torch.float32
    master[0] = 7.0  # finer than any weight; an update would do this
    flat.sync_masters()
    assert master[0] == 7.0
    with torch.no_grad():
        flat.parameters[0].fill_(2.0)
    flat.sync_masters()
    assert master[:6].eq(2).all() and master[32:36].eq(1).all()


def test_replaced_storage_is_refused_by_name() -> None:
    flat = store()
    flat.parameters[1].data = torch.zeros(4)
    with pytest.raises(RuntimeError, match="'p1' was replaced"):
        flat.sync_masters()


def test_an_optimizer_sees_flat_parts_or_whole_tensors() -> None:
    flat = store()
    (seen,) = flat.buckets[0].sub_groups
    assert (seen.bucket, seen.group, seen.lp_param) == (0, 0, None)
    assert [(piece.parameter, piece.in_shard, piece.numel) for piece in seen.pieces] == [(0, 0, 6), (1, 32, 4)]
    assert [tuple(t.parameter.shape) for t in seen.tensors] == [(64,)]
    flat = store(whole_tensors=True)
    (seen,) = flat.buckets[0].sub_groups
    assert [(tuple(t.parameter.shape), t.whole) for t in seen.tensors] == [((2, 3), 0), ((4,), 1)]
    assert seen.tensors[0].parameter.data_ptr() == flat.parameters[0].data_ptr()


def test_peers_give_whole_tensors_out_of_parts_and_take_them_back() -> None:
    flat = store()
    peers = peers_of(flat, LoneCollectives())
    (seen,) = flat.buckets[0].sub_groups
    wholes = peers.gather_whole(seen, seen.master)
    assert peers.members(seen) == [0, 1] and torch.equal(wholes[0], flat.parameters[0].detach())
    part = peers.scatter_whole(seen, {0: wholes[0] * 2, 1: wholes[1]})
    assert part[:6].tolist() == [0, 2, 4, 6, 8, 10] and part[32:36].tolist() == [1, 1, 1, 1]
    assert [spread.shape for spread in spread_of(flat)] == [(2, 3), (4,)]


def test_parameters_without_gradient_are_named() -> None:
    refuse_unused(store(), frozenset({0, 1}))
    with pytest.raises(RuntimeError, match=r"1 trainable .* p1\."):
        refuse_unused(store(), frozenset({0}))


def test_few_names_are_listed() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(i) for i in range(20)]) == "0, 1, 2, 3, 4, 5, 6, 7, ..."


def test_gradients_that_are_not_finite_at_the_smallest_scale_are_named() -> None:
    gradients = [(0, torch.ones(3)), (1, torch.tensor([float("inf")]))]
    with pytest.raises(RuntimeError, match=r"minimum \(1\).*finite: p1\."):
        refuse_minimum_loss_scale(iter(gradients), store().layout.specs, LoneCollectives(), 1.0)
