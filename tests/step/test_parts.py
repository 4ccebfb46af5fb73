"""Unit tests of the step's parts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.comm.collectives import LoneCollectives
from hf_zero.config import GradientPolicy, LossScalePolicy
from hf_zero.grads.boundary import Boundary
from hf_zero.grads.reducer import GradientReducer
from hf_zero.layout import ParameterSpec, plan_layout
from hf_zero.layout.sharding import Sharding
from hf_zero.offload.placement import Placements, in_memory_placement
from hf_zero.optim import WholeStepUpdater, updater_for
from hf_zero.params.flat import FlatParameters
from hf_zero.precision import Precision
from hf_zero.step.agreement import Agreement, listed, refuse_unused
from hf_zero.step.assemble import peers_of, spread_of
from hf_zero.step.outcome import NormRule, StepOutcome
from hf_zero.step.sharded_step import (
    LocalGradients,
    LossFactors,
    OwnedValues,
    ReducedGradients,
    ShardedStep,
    StepRules,
    held_gradients,
    refuse_minimum_loss_scale,
)
from tests.support.groups import groups_of

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def store(dtype: torch.dtype = torch.float32, *, whole_tensors: bool = False) -> FlatParameters:
    """Two parameters of a single rank, in one bucket."""
    parameters = [nn.Parameter(torch.arange(6.0).view(2, 3).to(dtype)), nn.Parameter(torch.ones(4, dtype=dtype))]
    name = str(dtype).removeprefix("torch.")
    specs = [ParameterSpec(f"p{i}", p.numel(), 0, name) for i, p in enumerate(parameters)]
    return FlatParameters(
        plan_layout(specs, world=1, bucket_numel=1000),
        parameters,
        Sharding(stage=0, rank=0, world=1),
        groups_of(),
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
    master[0] = 7.0  # not representable in the weights; an update would do this
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


def rules(**gradients: Any) -> StepRules:
    fp16 = LossScalePolicy(initial=8.0)
    policy = GradientPolicy(**{"clip_norm": 0.0, "average": True, "predivide": 1.0, **gradients})
    return StepRules(policy, skip_nonfinite=True, require_all_gradients=False, loss_scale=fp16)


def test_what_a_loss_was_multiplied_with_is_taken_out_of_its_gradients() -> None:
    factors = LossFactors(rules(predivide=2.0), world=4)
    assert (factors.next, factors.has_any, factors.of_gradients) == (4.0, False, 1 / 4 / 4)
    factors.expect(4.0)
    factors.scaler.scale = 16.0  # the next loss has another factor, these gradients do not
    assert (factors.next, factors.has_any, factors.of_gradients) == (8.0, True, 1 / 4 / 4)
    factors.refuse_mixed()
    factors.expect(8.0)
    with pytest.raises(RuntimeError, match=r"scaled by different factors \(\[4.0, 8.0\]\)"):
        factors.refuse_mixed()
    factors.clear()
    assert not factors.has_any
    assert LossFactors(rules(average=False), world=4).of_gradients == 1 / 8


def reducer(flat: FlatParameters) -> GradientReducer:
    sharding = Sharding(stage=0, rank=0, world=1)
    return GradientReducer(flat, sharding, groups_of(), Precision(None, None, None))


def backward(flat: FlatParameters, grads: GradientReducer, *, boundary: bool) -> None:
    grads.begin(Boundary.LAST if boundary else Boundary.ACCUMULATE)
    sum((parameter * 2).sum() for parameter in flat.parameters).backward()
    grads.finish()
    grads.wait()


def test_a_step_takes_sums_over_ranks_or_what_this_rank_has_alone() -> None:
    flat = store()
    grads = reducer(flat)
    (sub_group,) = flat.buckets[0].sub_groups
    reduced, local = ReducedGradients(grads), LocalGradients(grads, world=3)
    assert (reduced.num_added, local.num_added) == (1, 3)
    with reduced.opened(sub_group) as found:
        assert found is None
    backward(flat, grads, boundary=False)
    assert local.of(sub_group)[:6].eq(2).all() and [i for i, _ in held_gradients(grads, [sub_group])] == [0, 1]
    backward(flat, grads, boundary=True)
    with reduced.opened(sub_group) as found:
        assert found is not None and found[:6].eq(4).all() and torch.equal(found, reduced.of(sub_group))


def test_masters_and_states_are_at_hand_by_sub_group() -> None:
    flat = store(BF16)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
    (sub_group,) = flat.buckets[0].sub_groups
    grads = reducer(flat)
    agreement = Agreement(flat, grads, Sharding(0, 0, 1), groups_of(), Placements(CPU, in_memory_placement(CPU)))
    updater = WholeStepUpdater(optimizer, [sub_group])
    values = OwnedValues(flat, updater, ReducedGradients(grads), agreement)
    with values.state("exp_avg")(sub_group, False) as state:
        assert state is None
    optimizer.state[sub_group.tensors[0].parameter]["exp_avg"] = torch.arange(64.0)
    with values.state("exp_avg")(sub_group, False) as state:
        assert state is not None and state[63] == 63
    with values.master(sub_group, True) as master:
        assert master is not None
        master.fill_(3.0)
    values.master_to_params(1)
    assert flat.parameters[1].eq(3).all()


def test_a_step_applies_gradients_or_skips_where_they_are_not_finite() -> None:
    flat, sharding = store(), Sharding(stage=0, rank=0, world=1)
    grads = reducer(flat)
    (sub_group,) = flat.buckets[0].sub_groups
    updater = updater_for(torch.optim.SGD([sub_group.tensors[0].parameter], lr=0.5), [sub_group])
    placements = Placements(CPU, in_memory_placement(CPU))
    step = ShardedStep(flat, grads, updater, sharding, groups_of(), rules(), placements)
    step.expect(step.factors.next)
    backward(flat, grads, boundary=True)
    step.foresee_norm()
    assert step.grad_norm == pytest.approx((10 * 4 / 64) ** 0.5) and step.outcome is None
    step.run()
    assert flat.parameters[1].detach() == pytest.approx(torch.full((4,), 1 - 0.5 * 2 / 8))
    assert step.outcome is not None and not step.outcome.skipped and not step.factors.has_any
    grads.begin(Boundary.LAST)
    (flat.parameters[1].sum() * float("inf")).backward()
    grads.finish()
    before = flat.parameters[1].detach().clone()
    step.run()
    assert step.outcome.skipped and torch.equal(flat.parameters[1].detach(), before)


@pytest.mark.parametrize("squares", [math.nan, math.inf])
def test_the_norm_of_a_skipped_update_is_infinity(squares: float) -> None:
    """Infinities of both signs give NaN, which breaks logs and comparisons; without skipping it is the true norm."""
    sums = torch.tensor([squares, 0.0])
    assert StepOutcome(sums, NormRule(num_added=1, factor=0.5, clip_norm=1.0, skips=True)).norm == math.inf
    found = StepOutcome(sums, NormRule(num_added=1, factor=0.5, clip_norm=1.0, skips=False)).norm
    assert not math.isfinite(found) and math.isnan(found) == math.isnan(squares)
