"""Updates during backward, from host memory: results are bitwise identical, and less memory is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.config import ConfigError
from hf_zero.device.runtime import Runtime
from hf_zero.extras.streaming.updates import StreamedUpdates
from hf_zero.kernels.adam import AdamRule, adam
from hf_zero.kernels.dynamic8 import packed_bytes
from hf_zero.kernels.vectors import CPU_CHUNK_NUMEL, Applied, Vectors
from hf_zero.offload.split_masters import HalfRest, Recycled, SplitMasters
from hf_zero.optim.adam8 import AdamW8bit
from tests.offload.offload_runs import Run, assert_same_bits, engine_for, train, train_run, weights_of
from tests.offload.test_checkpoints import load_and_train, train_and_save
from tests.support.late import Late, use
from tests.support.models import mlp_batches
from tests.support.ranks import run_each, run_ranks

HOST = {"offload_param": {"device": "cpu"}, "sub_group_size": 64}
LAST_NORM = {"clipping": "last_norm"}


def run_of(streaming: dict[str, Any] | None = None, **changes: Any) -> Run:
    """Everything on the host, and no step is skipped; with `streaming`, updates run during backward."""
    sections: dict[str, Any] = {"bf16": {"enabled": changes.get("bf16", True), "check_grad_overflow": False}}
    if streaming is not None:
        sections["hf_zero"] = {"streaming": {"enabled": True, **streaming}}
    return replace(Run(3, HOST if streaming is not None else {}, sections=sections), **changes)


# Masters


def bits(upper: list[int], lower: list[int]) -> torch.Tensor:
    """All fp32 numbers with one of these upper halves and one of these lower halves."""
    high = torch.tensor(upper, dtype=torch.int64).view(-1, 1) << 16
    both = (high + torch.tensor(lower, dtype=torch.int64)).view(-1)
    return torch.where(both >= 1 << 31, both - (1 << 32), both).to(torch.int32).view(torch.float32)


def test_no_bit_of_a_master_is_lost() -> None:
    """Every upper half, with the lower halves around a tie: 16 more bits cannot record the direction of rounding."""
    masters = bits(list(range(1 << 16)), [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    masters = masters[~masters.isnan()]
    weights, rest = masters.to(torch.bfloat16).zero_(), HalfRest(torch.empty(len(masters), dtype=torch.int16))
    rest.split(masters, weights)
    again = torch.empty_like(masters)
    rest.join(weights, again)
    assert torch.equal(weights, masters.to(torch.bfloat16))
    assert torch.equal(again.view(torch.int32), masters.view(torch.int32))
    halfway = masters.view(torch.int32).bitwise_and(0xFFFF) == 0x8000
    assert len(rest.ties) == int((halfway & (masters.abs() > weights.float().abs())).sum()) > 30_000


def test_ties_are_rare_and_a_nan_stays_one() -> None:
    masters = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0))
    masters[5] = float("nan")
    weights, rest = masters.to(torch.bfloat16).zero_(), HalfRest(torch.empty(len(masters), dtype=torch.int16))
    rest.split(masters, weights)
    again = torch.empty_like(masters)
    rest.join(weights, again)
    assert torch.equal(again.nan_to_num(7.0), masters.nan_to_num(7.0))
    assert len(rest.ties) < 30


def test_parts_are_split_and_joined_by_themselves() -> None:
    """A part that is split again loses its old ties; those of its neighbours stay."""
    masters = bits(list(range(1 << 10)), [0x7FFF, 0x8000, 0x8001] * 3)
    weights, rest = masters.to(torch.bfloat16), HalfRest(torch.empty(len(masters), dtype=torch.int16))
    rest.split(masters, weights)
    start, length = 1000, 3001
    changed = masters.narrow(0, start, length).flip(0).clone()
    rest.part(start, length).split(changed, weights.narrow(0, start, length))
    masters[start : start + length] = changed
    assert list(rest.ties) == sorted(set(rest.ties)) and len(rest.ties) > 1000
    again = torch.empty_like(masters)
    for begin in range(0, len(masters), 999):
        part = again[begin : begin + 999]
        rest.part(begin, len(part)).join(weights[begin : begin + 999], part)
    assert torch.equal(again.view(torch.int32), masters.view(torch.int32))


@pytest.mark.parametrize("decoupled", [True, False])
def test_an_update_of_split_masters_is_that_of_whole_ones(decoupled: bool) -> None:
    """Bitwise, over more than one chunk, with ties in several of them."""
    generator, numel = torch.Generator().manual_seed(1), 2 * CPU_CHUNK_NUMEL * torch.get_num_threads() + 77
    masters = torch.randn(numel, generator=generator)
    masters.view(torch.int32)[::1001] &= -(1 << 16)
    masters.view(torch.int32)[::1001] |= 0x8000
    rule = AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=decoupled)
    weights, rest = masters.to(torch.bfloat16), HalfRest(torch.empty(numel, dtype=torch.int16))
    rest.split(masters, weights)
    assert len(rest.ties) > 50
    whole = Vectors(masters, torch.empty(0), (torch.zeros(numel), torch.zeros(numel)), masters.to(torch.bfloat16))
    split = Vectors(weights, torch.empty(0), (torch.zeros(numel), torch.zeros(numel)), rest=rest)
    for step in range(1, 4):
        gradient = torch.randn(numel, generator=generator).bfloat16()
        for vectors in (whole, split):
            adam(replace(vectors, gradient=gradient), rule, step, Applied(0.3))
    again = torch.empty_like(masters)
    rest.join(weights, again)
    assert torch.equal(again, masters) and torch.equal(weights, masters.to(torch.bfloat16))
    assert all(map(torch.equal, whole.states, split.states))


# Bitwise identical results


@pytest.mark.parametrize(
    ("changes", "world"),
    [({}, 1), ({}, 2), ({"accumulation": 2}, 2), ({"clip": 0.05}, 2), ({"bf16": False}, 2)],
    ids=["one rank", "two ranks", "accumulation", "exact clipping", "fp32"],
)
def test_the_same_bits_as_stage_3(changes: dict[str, Any], world: int) -> None:
    """The used parameters differ between ranks: those without a gradient on this rank are updated in the step."""
    outcomes, expected = run_each(train_run, world, [(world, run_of({}, **changes)), (world, run_of(**changes))])
    for outcome, wanted in zip(outcomes, expected, strict=True):
        if world == 1:  # units of a single rank: squares are summed in another order
            assert outcome[0] == pytest.approx(wanted[0], rel=1e-6)
            outcome = (wanted[0], outcome[1])
        assert_same_bits(outcome, wanted)


@pytest.mark.parametrize("early", [0.0, 0.3], ids=["late", "sometimes early"])
@pytest.mark.parametrize("masters", ["split", "fp32"])
def test_the_same_bits_on_a_device(early: float, masters: str) -> None:
    """Weights in host memory change while copies from there, and copies of gradients to there, are in flight."""

    def trained(run: Run) -> Any:
        torch.manual_seed(1234)
        engine = engine_for(run, 1)
        outcome = train(engine, run, 0, 1), weights_of(engine)
        engine.destroy()
        return outcome

    zero = {**HOST, "offload_optimizer": {"device": "cpu"}}
    with use(Late(early=early)):
        expected = trained(run_of(zero=zero))
    with use(Late(early=early)):
        assert_same_bits(trained(run_of({"masters": masters})), expected)
    with use(Runtime()):  # without device memory, squares are not summed parameter by parameter
        outcome = trained(run_of({"masters": masters}))
    assert outcome[0] == pytest.approx(expected[0], rel=1e-6)
    assert_same_bits((expected[0], outcome[1]), expected)


def test_checkpoints_go_into_plain_stage_3_and_back(tmp_path: Path) -> None:
    plain, streamed = run_of(), run_of({})
    first, second = str(tmp_path / "plain"), str(tmp_path / "streamed")
    expected, saved = run_each(train_and_save, 2, [(2, plain, first), (2, streamed, second)])
    loads = [(2, streamed, first), (2, plain, second), (2, streamed, second)]
    for outcome in (saved, *run_each(load_and_train, 2, loads)):
        for ours, wanted in zip(outcome, expected, strict=True):
            assert_same_bits(ours, wanted)


def test_states_of_16_bits_go_into_plain_stage_3(tmp_path: Path) -> None:
    [expected] = run_ranks(train_and_save, 1, 1, run_of({"states": "bf16"}), str(tmp_path / "bf16"))
    loads = [(1, run, str(tmp_path / "bf16")) for run in (run_of({"states": "bf16"}), run_of())]
    [again], [plain] = run_each(load_and_train, 1, loads)
    assert_same_bits(again, expected)
    assert plain[0] == pytest.approx(expected[0], rel=0.02)


# Bytes


def kept_bytes(engine: Any) -> float:
    """Bytes in host memory between steps, per trained parameter."""
    updater = engine.optimizer.updater
    numel = sum(sub_group.part.numel for sub_group in updater.sub_groups)
    states = sum(v.nbytes for s in updater.optimizer.state.values() for v in s.values() if v.dim())
    masters = sum(sub_group.stored.master.num_bytes for sub_group in updater.sub_groups)
    weights = sum(0 if s.stored.lp_param is None else s.stored.lp_param.num_bytes for s in updater.sub_groups)
    return float((states + masters + weights) / numel)


@pytest.mark.parametrize(
    ("streaming", "optimizer", "expected"),
    [
        ({}, torch.optim.AdamW, 12.0),
        ({"states": "bf16"}, torch.optim.AdamW, 8.0),
        ({}, AdamW8bit, 6.03),
        ({"masters": "fp32"}, torch.optim.AdamW, 14.0),
    ],
    ids=["fp32 states", "bf16 states", "8-bit states", "whole masters"],
)
def test_bytes_of_host_memory(streaming: dict[str, Any], optimizer: Any, expected: float) -> None:
    run = run_of(streaming, optimizer=(optimizer, {"lr": 1e-2}), zero={**HOST, "sub_group_size": 0})
    engine = engine_for(run, 1)
    train(engine, run, 0, 1)
    parts = [sub_group.part.numel for sub_group in engine.optimizer.updater.sub_groups]
    if optimizer is AdamW8bit:  # small units end within a block
        expected = 4.0 + 2 * sum(map(packed_bytes, parts)) / sum(parts)
    assert kept_bytes(engine) == pytest.approx(expected, rel=1e-3)  # and 4 bytes for each tie
    engine.destroy()


def test_one_gradient_at_a_time() -> None:
    run = run_of({})
    engine = engine_for(run, 1)
    buckets = engine.gradients.assembly.reducer.buckets
    assert isinstance(engine.gradients.assembly.step._streamed, StreamedUpdates)
    recycled = buckets[0].trained.placement.gradients
    assert isinstance(recycled, Recycled)
    train(engine, run, 0, 1, steps=1)
    unused = [bucket.bucket.numel for bucket in buckets if bucket.reduced._vector is not None]
    assert recycled.most_out <= max(bucket.bucket.numel for bucket in buckets) * 2 + sum(unused)
    assert recycled.most_out < sum(bucket.bucket.numel for bucket in buckets)
    masters = buckets[0].trained.placement.masters
    assert isinstance(masters, SplitMasters)
    assert masters._joined.most_out == max(each.part.numel for each in engine.optimizer.updater.sub_groups)
    engine.destroy()


# Clipping


def test_clipping_by_the_last_norm() -> None:
    """The first update is not clipped, the second by the norm of the first: bitwise as plain steps scaled so."""
    clip, steps = 0.05, 3
    run = run_of(LAST_NORM, clip=clip, steps=steps, optimizer=(torch.optim.SGD, {"lr": 0.5}))
    engine = engine_for(run, 1)
    numbers, streamed = train(engine, run, 0, 1), weights_of(engine)
    engine.destroy()
    norms = numbers[1::2]
    factors = [1.0, *(min(1.0, clip / (norm + 1e-6)) for norm in norms[:-1])]
    plain = run_of(steps=steps, optimizer=(torch.optim.SGD, {"lr": 0.5}))
    engine = engine_for(plain, 1)
    step = engine.gradients.assembly.step
    again = []
    for batch, factor in zip(mlp_batches(steps, 12), factors, strict=True):
        step.factors._mean = factor
        loss = engine(**{key: value.to(torch.bfloat16) for key, value in batch.items()}, flag=True)
        engine.backward(loss)
        engine.step()
        again.append(loss.item())
    assert again == numbers[::2]
    assert all(torch.equal(value, streamed[name]) for name, value in weights_of(engine).items())
    assert norms[0] > clip
    engine.destroy()


# Errors


def backward(engine: Any, flag: bool = True) -> None:
    [batch] = mlp_batches(1, 12)
    engine.backward(engine(**{key: value.to(torch.bfloat16) for key, value in batch.items()}, flag=flag))


def drop(engine: Any) -> None:
    backward(engine)
    engine.zero_grad()


def twice(engine: Any) -> None:
    backward(engine)
    backward(engine)


def other_rate(engine: Any) -> None:
    backward(engine)
    engine.optimizer.param_groups[0]["lr"] *= 2
    engine.step()


@pytest.mark.parametrize(
    ("act", "message"),
    [(drop, "would stay incomplete"), (twice, "second backward"), (other_rate, "have changed between backward")],
    ids=["zero_grad", "two backward passes", "another lr"],
)
def test_what_comes_too_late(act: Callable[[Any], None], message: str) -> None:
    engine = engine_for(run_of({}), 1)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        act(engine)
    engine.destroy()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (run_of({}, optimizer=(torch.optim.RMSprop, {"lr": 0.01})), "one element at a time, but RMSprop does not"),
        (run_of({"states": "bf16"}, optimizer=(torch.optim.RMSprop, {"lr": 0.01})), "masters and states"),
        (run_of({}, zero={}), 'set it to "cpu"'),
        (run_of({}, stage=2), "only stage 3 has"),
        (
            run_of(
                bf16=False, zero=HOST, sections={"fp16": {"enabled": True}, "hf_zero": {"streaming": {"enabled": True}}}
            ),
            "different exponent",
        ),
        (run_of({}, zero={**HOST, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}), "all masters and states"),
        (run_of({}, zero={**HOST, "zero_hpz_partition_size": 2}), "synchronize every unit"),
    ],
    ids=["optimizer", "its states", "no offload_param", "stage", "fp16", "ratio", "hpZ"],
)
def test_what_is_refused(run: Run, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        engine_for(run, 1)
