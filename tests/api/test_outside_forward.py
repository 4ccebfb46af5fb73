"""Stage 3's parameters outside forward: reads and writes are detected, and either work or raise; nothing is lost."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from hf_zero import initialize
from hf_zero.api import parameter_access
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.params.stand_ins import ReleasedView
from hf_zero.params.unit import digest
from tests.support.limits import NOTHING_STAYS
from tests.support.ranks import run_each, run_ranks

BOTH: list[dict[str, int]] = [NOTHING_STAYS, {}]


class Net(nn.Module):
    """A layer too large to be persistent by default, a small one, and a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 30_000), nn.Linear(30_000, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(self.first(x)))
        return hidden * self.scale


def engine_of(limits: dict[str, int], module: nn.Module | None = None, stage: int = 3, **sections: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **(limits if stage == 3 else {})},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-2}},
        **sections,
    }
    return initialize(model=module or Net(), config=config)[0]


def step(engine: Any, seed: int = 1) -> None:
    dtype = engine.module.first.weight.dtype
    engine.train()
    inputs = torch.randn(2, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
    engine.backward(engine(inputs).float().square().mean())
    engine.step()


def evaluate(engine: Any) -> Tensor:
    engine.eval()
    with torch.no_grad():
        return engine(torch.ones(2, 5, dtype=engine.module.first.weight.dtype)).clone()


def whole(parameter: nn.Parameter) -> Tensor:
    with GatheredParameters(parameter):
        return parameter.detach().clone()


# --- reads -------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.norm(),
    "functional.norm": lambda p: torch.norm(p),
    "numpy": lambda p: p.detach().numpy(),
    "__array__": lambda p: np.asarray(p.detach()),
    "clone": lambda p: p.detach().clone(),
    "cat": lambda p: parameters_to_vector([p]),
    "mul": lambda p: p * 2,
    "add": lambda p: 1 + p,
    "item": lambda p: p.view(-1)[0].item(),
    "tolist": lambda p: p.tolist(),
    "__float__": lambda p: float(p.view(-1)[0]),
    "__reduce_ex__": lambda p: torch.save(p, io.BytesIO()),
    "__reduce_ex__ ": lambda p: pickle.dumps(p.data),
    "__deepcopy__": lambda p: copy.deepcopy(p.data),
    "lerp_": lambda p: torch.zeros(p.shape).lerp_(p.detach(), 0.1),
    "copy_": lambda p: torch.empty(p.shape).copy_(p),
    "isnan": lambda p: torch.isnan(p).any(),
    "_foreach_add": lambda p: torch._foreach_add([torch.zeros(p.shape)], [p]),
    "__getitem__": lambda p: p[torch.tensor([0])],
    "linear": lambda p: nn.functional.linear(torch.ones(1, p.shape[1]), p),
}
WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda p: p.data.mul_(2),
    "copy_": lambda p: p.data.copy_(torch.ones(p.shape)),
    "zero_": nn.init.zeros_,
    "normal_": nn.init.normal_,
    "fill_": lambda p: p.detach().fill_(1.0),
    "__setitem__": lambda p: p.data.__setitem__(0, 1.0),
    "add": lambda p: torch.add(torch.ones(p.shape), 1, out=p.data),
    "data.__set__": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "data.__set__ ": lambda p: vector_to_parameters(torch.ones(p.numel()), [p]),
    "half": lambda p: p.half(),
    "bfloat16": lambda p: p.data.bfloat16(),
    "to": lambda p: nn.Module.to(_holder(p), torch.float16),
}


def _holder(parameter: nn.Parameter) -> nn.Module:
    module = nn.Module()
    module.weight = parameter
    return module


def run_refusals(rank: int, limits: dict[str, int]) -> None:
    engine = engine_of(limits)
    weight = engine.module.first.weight
    for _ in range(2):  # before any training, and after a step
        for name, use in [*READS.items(), *WRITES.items()]:
            verb = "(read|copied)" if use in READS.values() else "(written to|given other data|converted)"
            pattern = rf"parameter 'first.weight' cannot be {verb} here \(\S*{name.strip()}\)[\s\S]*GatheredParameters"
            with pytest.raises(RuntimeError, match=pattern):
                use(weight)
        with pytest.raises(RuntimeError, match=r"'first.weight' cannot be copied here[\s\S]*safe_get_full_fp32_param"):
            copy.deepcopy(weight)
        with pytest.raises(RuntimeError, match=r"'first.weight' cannot be written to here \(torch.Tensor.copy_\)"):
            engine.module.load_state_dict(Net().state_dict())
        step(engine)
    expected = Net()
    assert not torch.equal(whole(weight), expected.first.weight), "not trained"


def test_what_can_be_seen_of_a_released_parameter_is_refused_by_name() -> None:
    """An EMA callback averaged parameters after every step and silently collected NaN for a whole run. `copy_`, `mul_`
    and `load_state_dict` failed with torch's error about "a single memory location", and `p.data = new`, `.half()` and
    `.to(torch.float16)` silently changed nothing."""
    run_each(run_refusals, 2, [(limits,) for limits in BOTH])


def run_descriptions(rank: int) -> None:
    engine = engine_of(NOTHING_STAYS)
    for name, p in engine.module.named_parameters():
        plain = dict(Net().named_parameters())[name]
        assert isinstance(p, nn.Parameter) and isinstance(p.data, Tensor) and p.is_leaf and p.grad is None
        assert (p.shape, p.ndim, p.numel(), p.size()) == (plain.shape, plain.ndim, plain.numel(), plain.size())
        assert (p.dtype, p.ds_shape, p.ds_numel) == (plain.dtype, plain.shape, plain.numel())
        assert len(p.stride()) == p.ndim
        assert p.device == plain.device and p.requires_grad and p.is_floating_point() and p.nbytes == plain.nbytes
        assert hash(p) == id(p) and {p: 1}[p] == 1 and p.data_ptr() and p.untyped_storage().nbytes() == 4
        assert f"{name}: released" in repr(p) and name in f"{p}" and p is not None and (p != None)  # noqa: E711
        assert p.to("cpu") is p and p.to(torch.float32) is p and p.float() is p and p.cpu() is p
        p.data = nn.functional.pad(p.data, (0, 0), "constant", 0)  # as transformers does with the bias of a tied head
        assert torch.empty_like(p).shape == p.data.shape == p.detach().view(-1).view(p.shape).shape == plain.shape
        assert type(torch.zeros_like(p)) is Tensor and p.new_ones(2).sum() == 2
        p.requires_grad_(False).requires_grad_(True)
        handle = p.register_hook(lambda gradient: gradient)
        handle.remove()
    assert engine.module.to("cpu") is engine.module and engine.module.float() is engine.module
    addresses = [p.data_ptr() for p in engine.module.parameters()]
    assert len(set(addresses)) == len(addresses)
    ids = [id(p) for p in engine.module.parameters()]
    norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
    step(engine)
    assert norm == 0 and ids == [id(p) for p in engine.module.parameters()]
    assert [p.shape for p in engine.module.parameters()] == [p.shape for p in Net().parameters()]
    engine.destroy()
    with pytest.raises(RuntimeError, match="cannot be read here"):
        engine.module.scale.item()


def test_a_released_parameter_is_still_described_by_everything_that_needs_no_values() -> None:
    """Libraries query parameters during training (sizes, addresses, devices, gradients, hooks, no-op conversions).
    These queries worked before reads raised an error, and must still work. Partitioned parameters once were empty: a
    head got the size 0 from `lm_head.weight.shape`, and code that checks `.ndim == 2` silently left features out."""
    run_ranks(run_descriptions, 2)


# --- writes to gathered parameters ----------------------------------------------------------------------------------


def by_tensor(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(3)


def by_data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(3)


KINDS = [(write, sections) for write in (by_tensor, by_data) for sections in ({}, {"bf16": {"enabled": True}})]


def run_write_after_evaluation(rank: int, limits: dict[str, int], name: str) -> list[Any]:
    return [write_after_evaluation(engine_of(limits, **sections), name, write) for write, sections in KINDS]


def write_after_evaluation(engine: Any, name: str, write: Callable[[nn.Parameter], None]) -> Any:
    """The error message; or the weight before, its master after tripling it, and the weight after one more step."""
    parameter = engine.module.get_parameter(name)
    step(engine)
    before = evaluate(engine)
    started = whole(parameter)
    try:
        write(parameter)
    except RuntimeError as error:
        return str(error)
    assert not torch.equal(evaluate(engine), before), "the write is not seen"
    master = parameter_access.safe_get_full_fp32_param(parameter)
    step(engine)
    return started.float(), master, whole(parameter).float()


def test_a_write_after_evaluation_is_kept_or_refused() -> None:
    """After `evaluate()` the default limits leave parameters gathered. The effect of `model.lm_head.weight.mul_(3)` was
    visible in the next evaluation, but the next training step restored the old values."""
    refused, kept = run_each(run_write_after_evaluation, 2, [(limits, "first.weight") for limits in BOTH])
    for found in itertools.chain(*refused):
        assert "'first.weight' cannot be written to here (torch.Tensor.mul_)" in found
    for started, master, after in itertools.chain(*kept):
        torch.testing.assert_close(master, 3 * started, rtol=1e-2, atol=0)
        torch.testing.assert_close(after, 3 * started, rtol=2e-2, atol=2e-2)


@pytest.mark.at_once
def test_a_write_to_a_persistent_parameter_is_kept() -> None:
    """`logit_scale.data.clamp_()` after a step, as in CLIP: writes through `data` were lost at the next step."""
    for run in run_ranks(run_write_after_evaluation, 2, {}, "scale"):
        for started, master, after in run:
            torch.testing.assert_close(master, 3 * started, rtol=1e-2, atol=0)
            assert abs(after - started) > started


@pytest.mark.parametrize("shape", [(), (3,), (64,), (7, 5), (64, 64), (1001,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_sees_every_bit_and_the_order(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    known = digest(values)
    assert digest(values.clone()) == known and digest(torch.full_like(values, float("nan"))) != known
    for place in range(values.numel()):
        changed = values.clone()
        changed.view(-1)[place].mul_(1 + 2 * torch.finfo(dtype).eps)
        assert digest(changed) != known
    for dim in range(values.ndim):
        assert digest(values.flip(dim)) != known and digest(values.roll(1, dim)) != known


def run_views(rank: int, limits: dict[str, int]) -> None:
    engine = engine_of(limits)
    evaluate(engine)
    weight = engine.module.first.weight
    taken = {"detached": weight.detach(), "data": weight.data, **engine.module.state_dict()}
    before = {name: view.clone() for name, view in taken.items() if not isinstance(view, ReleasedView)}
    assert bool(before) == (limits != NOTHING_STAYS)
    for seed in range(2):
        step(engine, seed)
        evaluate(engine)
    for name in before:
        assert torch.isfinite(taken[name]).all()
    if limits != NOTHING_STAYS:
        assert torch.equal(taken["detached"], before["detached"]) and not torch.equal(weight, before["detached"])
        assert torch.equal(taken["first.weight"], before["first.weight"])
    uses = [part.whole._num_uses() for unit in engine.module_view.store.units for part in unit.parts]
    evaluate(engine)
    step(engine)
    evaluate(engine)
    assert uses == [part.whole._num_uses() for unit in engine.module_view.store.units for part in unit.parts]


def test_views_that_were_taken_after_an_evaluation_stay_what_they_were() -> None:
    """A user kept `best = model.state_dict()` after `evaluate()` and trained another step. Reading `best` then ended in
    a segmentation fault, because the memory had been freed."""
    run_each(run_views, 2, [(limits,) for limits in BOTH])


def run_rows_of_one_rank(rank: int, limits: dict[str, int]) -> Tensor:
    engine = engine_of(limits)
    evaluate(engine)
    engine.module.first.weight.data[0].fill_(7.0)  # entirely in rank 0's shard
    step(engine)
    return whole(engine.module.first.weight)[0]


def test_a_write_into_one_ranks_shard_alone_is_kept() -> None:
    """Ranks compare the whole parameter, so a write by all ranks to a row in rank 0's shard is accepted."""
    for row in run_ranks(run_rows_of_one_rank, 2, {}):
        torch.testing.assert_close(row, torch.full((5,), 7.0), rtol=0, atol=0.1)


def run_unequal_writes(rank: int) -> list[str]:
    said = []
    for write, name in [
        (by_tensor, "first.weight"),
        (by_data, "first.weight"),
        (by_tensor, "scale"),
        (by_data, "scale"),
    ]:
        engine = engine_of({})
        evaluate(engine)
        if rank == 1:
            write(engine.module.get_parameter(name))
        with pytest.raises(RuntimeError) as caught:
            step(engine)
        said.append(f"{name}: {caught.value}")
        engine.destroy()
    return said


@pytest.mark.at_once
def test_a_write_on_one_rank_is_refused_on_all() -> None:
    """Each rank took its own shard of its own values: rank 1's half of the new weight, rank 0's of the old."""
    for said in (line for run in run_ranks(run_unequal_writes, 2) for line in run):
        name = said.partition(":")[0]
        assert "not with the same values on all ranks" in said and f" {name} (ranks [1] differ" in said


def run_replaced(rank: int, limits: dict[str, int]) -> list[str]:
    said = []
    for name, dtype in [("first.weight", torch.float32), ("scale", torch.float32), ("first.weight", torch.float16)]:
        engine = engine_of(limits)
        evaluate(engine)
        parameter = engine.module.get_parameter(name)
        with pytest.raises(RuntimeError) as caught:
            parameter.data = torch.ones(parameter.shape, dtype=dtype)
            step(engine)
        said.append(f"'{name}': {caught.value}")
        engine.destroy()
    return said


def test_other_data_for_a_parameter_is_refused_by_name() -> None:
    """`p.data = new`, `.half()` and `.to(torch.float16)` were ignored: training continued with the old values and
    dtype. Below stage 3 they raise an error at the next step."""
    cases = run_each(run_replaced, 2, [(limits,) for limits in BOTH])
    for line in (line for ranks in cases for run in ranks for line in run):
        name, _, said = line.partition(": ")
        assert name in said and ("was replaced" in said or "cannot be given other data" in said), said


# --- complex parameters --------------------------------------------------------------------------------------------


class Filter(nn.Module):
    """A complex weight, as in state-space models and Fourier layers."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spectrum = nn.Parameter(torch.randn(7, dtype=torch.complex64), requires_grad=trains)
        self.first = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        filtered = torch.fft.ifft(torch.fft.fft(x) * self.spectrum).real
        result: Tensor = self.first(filtered)
        return result


def run_complex(rank: int) -> list[str]:
    said = []
    for stage, limits in [(0, {}), (1, {}), (2, {}), (3, {}), (3, NOTHING_STAYS)]:
        with pytest.raises(ValueError) as caught:
            engine_of(limits, Filter(True), stage)
        said.append(str(caught.value))
        engine = engine_of(limits, Filter(False), stage)
        inputs = torch.randn(2, 7, generator=torch.Generator().manual_seed(rank))
        engine.backward(engine(inputs).square().mean())
        engine.step()
        assert torch.equal(engine.module.spectrum, Filter(False).spectrum)
        engine.destroy()
    return said


def test_complex_parameters_are_refused_by_name() -> None:
    """At stage 3 the imaginary part of a complex64 parameter was silently never updated; at other stages the error did
    not name the parameter. Frozen complex parameters work."""
    for said in (line for run in run_ranks(run_complex, 2) for line in run):
        assert "1 trainable parameters are complex" in said and "spectrum (torch.complex64)" in said
        assert "torch.view_as_real" in said


def run_moves(rank: int) -> None:
    engine = engine_of(NOTHING_STAYS)
    weight = engine.module.first.weight
    assert engine.module.to(torch.device("cpu", 0)) is engine.module and weight.to("cpu:0") is weight
    assert weight.to(device="cpu:0") is weight and engine.module.first.weight is weight
    with pytest.raises(RuntimeError, match="cannot be converted here"):
        weight.to("cpu:0", torch.float16)
    with pytest.raises(RuntimeError, match="cannot be read here"):
        weight.to("cpu:0", copy=True)


def test_a_module_moves_to_the_number_of_the_cpu_that_it_is_on() -> None:
    """Lightning's Fabric moves every module to its device, for example `cpu:0`. torch copies tensors for that, although
    it is the same device, and at stage 3 the copy failed: "parameter of shape (61, 15) cannot be read here"."""
    run_ranks(run_moves, 2)
