"""Stage 3's public API: GatheredParameters, zero.Init, safe_* functions, removing hooks, several engines."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import hf_zero
from hf_zero import initialize
from hf_zero.api import parameter_access
from hf_zero.api.gathered_parameters import GatheredParameters, register_external_parameter
from hf_zero.api.zero_init import Init
from hf_zero.params.sharded_parameter import ZeroParamStatus
from hf_zero.params.store import of
from tests.support.models import stack, tiny_llama, token_rows
from tests.support.ranks import run_each, run_ranks

SHARDED = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def config(stage: int = 3, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        **sections,
    }


class Net(nn.Module):
    """Two layers of odd sizes and a parameter of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def step(engine: Any, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    engine.backward(engine(torch.randn(2, 5, generator=generator)).square().mean())
    engine.step()


def run_gathered(rank: int) -> None:
    engine = initialize(model=Net(), config=config())[0]
    model = engine.module
    weight, bias = model.first.weight, model.first.bias
    assert weight.shape == (7, 5) and weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    with pytest.raises(RuntimeError, match=r"'first.weight' cannot be written to here \(torch.Tensor.normal_\)"):
        weight.data.normal_()

    with GatheredParameters([weight, None, torch.ones(2), bias]):
        assert torch.equal(weight, Net().first.weight) and weight.ds_status is ZeroParamStatus.AVAILABLE
        assert model.second.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        with GatheredParameters(weight):
            weight.data.fill_(5.0)
        assert (weight == 5.0).all()  # the outer context still gathers it
    with GatheredParameters(iter([weight])):
        assert torch.equal(weight, Net().first.weight)  # without modifier_rank edits are dropped

    with GatheredParameters([weight, bias], modifier_rank=1):
        weight.data.fill_(float(rank))
        bias.data.copy_(torch.arange(7.0) * (rank + 1))
    with GatheredParameters([weight, bias]):
        assert (weight == 1.0).all() and torch.equal(bias.data, torch.arange(7.0) * 2)
    assert torch.equal(parameter_access.safe_get_full_fp32_param(weight), torch.ones(7, 5))

    with pytest.raises(ZeroDivisionError), GatheredParameters(weight, modifier_rank=0):
        weight.data.zero_()
        raise ZeroDivisionError
    with GatheredParameters(weight):
        assert (weight == 1.0).all()
    with GatheredParameters(weight, enabled=False), pytest.raises(RuntimeError, match="cannot be read here"):
        weight.isnan()


def test_gathered_parameters() -> None:
    """Weight surgery on rank 0 was lost; nested contexts raised an error, or released weights of the outer one."""
    run_ranks(run_gathered, 2)
    run_ranks(run_gathered, 3)


def run_wrong_shape(rank: int) -> None:
    engine = initialize(model=Net(), config=config())[0]
    with GatheredParameters(engine.module.scale, modifier_rank=0):
        engine.module.scale.data = torch.ones(4)


def test_a_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"'scale' was given a tensor of shape \(4,\)[\s\S]*it has \(3,\)"):
        run_ranks(run_wrong_shape, 2)


def run_lost_edit(rank: int) -> None:
    engine = initialize(model=Net(), config=config())[0]
    if rank == 1:
        with torch._C.DisableTorchFunctionSubclass():  # as C++ code writes
            nn.init.zeros_(engine.module.first.bias)
    step(engine)


@pytest.mark.at_once
def test_a_constant_written_to_a_released_parameter_is_noticed() -> None:
    """torch silently writes a constant into an expanded tensor. If the parameter's class does not intercept the write,
    the edit would be lost."""
    with pytest.raises(AssertionError, match=r"1 parameters were overwritten[\s\S]*first.bias|another rank has overw"):
        run_ranks(run_lost_edit, 2)


class Kernels(TorchDispatchMode):
    """Counts operators that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def run_count_marks(rank: int) -> tuple[list[str], int, float]:
    engine = initialize(model=Net(), config=config(bf16={"enabled": True}))[0]
    store = engine.module_view.store
    with torch._C.DisableTorchFunctionSubclass():
        nn.init.zeros_(engine.module.first.bias)
    with Kernels() as kernels:
        num_lost = store.edits.num_lost()
    return kernels.names, len(list(engine.module.parameters())), float(num_lost)


def test_looking_for_lost_edits_takes_a_few_kernels_however_many_parameters() -> None:
    """It took one cast per parameter in every step."""
    for names, num_parameters, found in run_ranks(run_count_marks, 2):
        assert num_parameters >= 5 and found == 1.0
        assert sorted(names) == sorted(["aten::stack", "aten::isnan", "aten::logical_not", "aten::sum", "aten::add"])


def run_born_sharded(rank: int) -> dict[str, torch.Tensor]:
    whole: list[int] = []

    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            whole.append(sum(p.numel() for p in self.parameters() if of(p) is None))
            nn.init.constant_(self.second.bias, 3.0)  # reads a parameter that is already partitioned
            self.tied = nn.Linear(5, 7)
            self.tied.weight = self.first.weight

    @Init(config_dict_or_path=config(bf16={"enabled": True}))
    def build() -> Counting:
        with Init(config_dict_or_path=config(bf16={"enabled": True})):
            return Counting()

    model = build()
    assert whole == [3]  # only the parameter of the module under construction
    assert all(of(parameter) is not None for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.tied.weight is model.first.weight and model.first.weight.shape == (7, 5)
    assert model.first.weight.ds_tensor.numel() == 18 and model.first.weight.ds_numel == 35
    with GatheredParameters(list(model.parameters())):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_modules_are_born_sharded_and_what_their_code_does_then_is_kept() -> None:
    """The model's own init code saw parameters without elements, so that torch's defaults silently remained."""
    for weights in run_ranks(run_born_sharded, 2):
        assert torch.equal(weights["second.bias"], torch.full((3,), 3.0, dtype=torch.bfloat16))
        assert torch.equal(weights["first.weight"], Net().first.weight.bfloat16())


def run_teacher(rank: int) -> torch.Tensor:
    with Init(config_dict_or_path=config()):
        teacher = Net()
    x = torch.ones(2, 5)
    with pytest.raises(RuntimeError, match=r"cannot be read here .* No engine has this model.* accelerator.prepare"):
        teacher(x)
    engine = initialize(model=teacher, config={key: v for key, v in config().items() if key != "optimizer"})[0]
    with torch.no_grad():
        answer: torch.Tensor = engine(x)
    return answer


def test_a_model_without_an_engine_is_told_to_get_one() -> None:
    """A teacher, loaded by `from_pretrained` at stage 3: the error told how to read a weight."""
    for answer in run_ranks(run_teacher, 2):
        assert torch.equal(answer, Net()(torch.ones(2, 5)))


def run_module_argument(rank: int) -> bool:
    model = Net()
    Init(module=model, config_dict_or_path=config())
    return all(of(parameter) is not None for parameter in model.parameters())


def test_an_existing_module_is_converted() -> None:
    assert run_ranks(run_module_argument, 2) == [True, True]


def run_safe_functions(rank: int, stage: int) -> list[torch.Tensor]:
    engine = initialize(model=Net(), config=config(stage, gradient_clipping=0.0))[0]
    weight = engine.module.second.weight
    assert parameter_access.safe_get_full_optimizer_state(weight, "exp_avg") is None
    engine.backward(engine(torch.full((2, 5), rank + 1.0)).square().mean())
    found = [parameter_access.safe_get_full_fp32_param(weight), parameter_access.safe_get_full_grad(weight)]
    parameter_access.safe_set_full_grad(weight, torch.full((3, 7), 0.5))
    assert torch.equal(parameter_access.safe_get_full_grad(weight), torch.full((3, 7), 0.5))
    engine.step()
    assert parameter_access.safe_get_full_grad(weight) is None
    found.append(parameter_access.safe_get_full_optimizer_state(weight, "exp_avg"))
    parameter_access.safe_set_full_optimizer_state(weight, torch.full((3, 7), 7.0), "exp_avg")
    found.append(parameter_access.safe_get_full_optimizer_state(weight, "exp_avg"))
    parameter_access.safe_set_full_fp32_param(weight, torch.arange(21.0).view(3, 7))
    with GatheredParameters(weight):
        found.append(weight.detach().clone())
    if stage == 3:
        chunk = parameter_access.safe_get_local_fp32_param(weight)
        assert torch.equal(chunk, torch.arange(21.0)[rank * 11 : (rank + 1) * 11])
        parameter_access.safe_set_local_fp32_param(weight, chunk + 1)
        assert torch.equal(parameter_access.safe_get_full_fp32_param(weight), torch.arange(21.0).view(3, 7) + 1)
    return found


def test_full_views_of_weight_gradient_and_state() -> None:
    """Of 21 elements: a parameter whose size the ranks do not divide was read without its last elements, or not at all,
    on every rank but the first."""
    model = Net()
    sum(model(torch.full((2, 5), rank + 1.0)).square().mean() / 2 for rank in range(2)).backward()
    found = run_each(run_safe_functions, 2, [(stage,) for stage in (0, 1, 2, 3)])
    for weight, gradient, moment, edited, written in itertools.chain(*found):
        torch.testing.assert_close(weight, model.second.weight.detach())
        torch.testing.assert_close(gradient, model.second.weight.grad)
        torch.testing.assert_close(moment, torch.full((3, 7), 0.05))
        assert torch.equal(edited, torch.full((3, 7), 7.0))
        assert torch.equal(written, torch.arange(21.0).view(3, 7))


def run_unreduced(rank: int, stage: int) -> list[list[float]]:
    engine = initialize(model=nn.Linear(3, 2), config=config(stage, gradient_accumulation_steps=2))[0]
    weight, x = engine.module.weight, torch.full((2, 3), rank + 1.0)
    with engine.no_sync():
        engine.backward(engine(x).sum())
        own = parameter_access.safe_get_full_grad(weight)
        assert own is not None
        parameter_access.safe_set_full_grad(weight, 3 * own)
        changed = parameter_access.safe_get_full_grad(weight)
    engine.micro_steps += 1
    engine.backward(engine(x).sum())
    reduced = parameter_access.safe_get_full_grad(weight)
    engine.step()
    assert parameter_access.safe_get_full_grad(weight) is None
    with pytest.raises(RuntimeError, match="has no gradient to overwrite"):
        parameter_access.safe_set_full_grad(weight, own)
    assert own is not None and changed is not None, (own, changed)
    assert reduced is not None
    return [found[0].tolist() for found in (own, changed, reduced)]


def test_gradients_that_are_not_reduced_yet_can_be_read() -> None:
    """`safe_get_full_grad` was None inside `no_sync` at stages 0 and 1, where each rank has its own gradient."""
    for ranks in run_each(run_unreduced, 2, [(0,), (1,)]):
        for rank, (own, changed, reduced) in enumerate(ranks):
            # Two rows of value rank + 1, halved by the two accumulation steps.
            assert own == [rank + 1.0] * 3 and changed == [3 * (rank + 1.0)] * 3
            assert reduced == [(4 * 1.0 + 4 * 2.0) / 2] * 3


def test_gradients_are_updated_with_their_parameter_at_hand() -> None:
    """DeepSpeed calls the function of `safe_update_full_grad_vectorized` as f(gradient, parameter). hf_zero passed one
    argument, so code written for DeepSpeed failed.
    """
    engine = initialize(model=Net(), config=config(2))[0]
    engine.backward(engine(torch.ones(2, 5)).sum())
    seen = []

    def double(gradient: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
        seen.append(parameter)
        return 2 * gradient

    parameters = list(engine.module.parameters())
    read = parameter_access.safe_get_full_grad
    before = [read(parameter) for parameter in parameters]
    parameter_access.safe_update_full_grad_vectorized(parameters, double)
    assert seen == parameters
    assert all(torch.equal(read(p), 2 * old) for p, old in zip(parameters, before, strict=True))


def run_surgery(rank: int, enters: bool) -> list[float]:
    engine = initialize(model=Net(), config=config())[0]
    norms = []
    for seed in range(4):
        step(engine, seed)
        norms.append(engine.get_global_grad_norm())
        if enters:
            offload = engine.optimizer.parameter_offload
            with hf_zero.gathered(engine) as model, hf_zero.gathered(model):
                for hook in [*offload.forward_hooks, *offload.backward_hooks]:
                    hook.remove()
                copied = copy.deepcopy(model)
                assert torch.equal(copied.scale, model.scale) and of(copied.scale) is None
                with torch.no_grad():
                    assert torch.isfinite(model(torch.ones(2, 5))).all()
                offload._register_deepspeed_module(offload.module)
            with pytest.raises(RuntimeError, match=r"'scale' cannot be read"):
                torch.save(engine.module.state_dict(), io.BytesIO())
            with pytest.raises(RuntimeError, match=r"cannot be copied here"):
                copy.deepcopy(engine.module)
    return norms


def test_gathering_taking_hooks_off_and_refused_reads_leave_training_as_it_was() -> None:
    assert run_ranks(run_surgery, 2, True) == run_ranks(run_surgery, 2, False)


def run_copy(rank: int) -> list[float]:
    engine = initialize(model=Net(), config=config())[0]
    seen: list[str] = []
    engine.module.first.register_forward_hook(lambda *_: seen.append("first"))
    step(engine)
    with hf_zero.gathered(engine) as model:
        copied = copy.deepcopy(model)
    rows, losses = torch.ones(2, 5), []
    if rank == 0:  # a copy has no hooks that would wait for other ranks
        copied(rows).square().mean().backward()
        torch.optim.SGD(copied.parameters(), lr=0.1).step()
        losses.append(copied(rows).square().mean().item())
    assert seen == ["first"] * (3 if rank == 0 else 1), "hooks of the program's are copied"
    copied.first._forward_hooks.clear()
    loaded = pickle.loads(pickle.dumps(copied))
    assert torch.equal(loaded.scale, copied.scale) and loaded.ds_external_parameters is None
    for thing in (engine.module, nn.ModuleList([engine.module.first])):
        with pytest.raises(RuntimeError, match=r"cannot be pickled, .* copied = copy.deepcopy\(model\)"):
            torch.save(thing, io.BytesIO())
    with pytest.raises(TypeError, match="copy its model"):
        copy.deepcopy(engine)
    step(engine)
    with torch.no_grad():
        return [*losses, engine(rows).square().mean().item()]


def test_a_copy_runs_on_one_rank_alone_and_can_be_pickled() -> None:
    """A copy had the hooks of its original, and waited for other ranks to gather what that has; it could not be
    pickled for them, nor could its original, of which the error told nothing but the name of a function."""
    alone, first = run_ranks(run_copy, 2)[0]
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(2, 5, generator=generator)
    plain(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ahead = copy.deepcopy(plain)
    ahead(torch.ones(2, 5)).square().mean().backward()
    torch.optim.SGD(ahead.parameters(), lr=0.1).step()
    assert ahead(torch.ones(2, 5)).square().mean().item() == pytest.approx(alone, rel=1e-5)
    plain(batch).square().mean().backward()
    optimizer.step()
    assert plain(torch.ones(2, 5)).square().mean().item() == pytest.approx(first, rel=1e-5)


def run_two_engines(rank: int) -> list[float]:
    model = tiny_llama()
    batch = stack(token_rows(2))
    inference = {key: value for key, value in config().items() if key != "optimizer"}
    frozen = initialize(model=model, config=inference)[0]
    with torch.no_grad():
        first = frozen.eval()(**batch).loss.item()
    engine = initialize(model=model, config=config())[0]
    with torch.no_grad():
        second = frozen(**batch).loss.item()
    engine.train()
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    engine.destroy()
    again = initialize(model=model, config=config())[0]
    return [first, second, loss.item(), again(**batch).loss.item()]


def test_engines_one_after_the_other_on_one_model() -> None:
    """DPO computes reference values with the policy through one engine, and later trains it with another."""
    expected = tiny_llama()(**stack(token_rows(2))).loss.item()
    for first, second, third, later in run_ranks(run_two_engines, 2):
        assert [first, second, third] == pytest.approx([expected] * 3, rel=1e-6)
        assert later < expected


def run_leaf(rank: int) -> tuple[str, ...]:
    settings = config()
    settings["zero_optimization"]["leaf_module"] = {"classes": ["LlamaModel"]}
    return tuple(unit.name for unit in initialize(model=tiny_llama(), config=settings)[0].module_view.store.units)


def test_leaf_modules_of_the_config_are_units() -> None:
    assert run_ranks(run_leaf, 2)[0] == ("model", "lm_head")


def test_only_parameters_can_be_registered_as_external() -> None:
    with pytest.raises(RuntimeError, match="takes an nn.Parameter, got Tensor"):
        register_external_parameter(nn.Linear(1, 1), torch.ones(1))  # type: ignore[arg-type]
