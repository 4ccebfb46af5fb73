"""Odd parts of a model: empty parameters, late hooks of the user, modules of torch.jit, leaf modules."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import initialize
from hf_zero.api.gathered_parameters import gathered
from hf_zero.api.zero_init import Init
from hf_zero.params.hooked_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
)
from tests.support.beside_plain import PlainEngine
from tests.support.limits import NOTHING_STAYS
from tests.support.ranks import run_each, run_ranks


def config_of(stage: int, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage, **(NOTHING_STAYS if stage == 3 else {})},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        **sections,
    }


def engines_of(make: Callable[[], nn.Module], stage: int = 3) -> Iterator[Any]:
    """The same model in plain PyTorch and with an engine."""
    for is_plain in (True, False):
        torch.manual_seed(0)
        model = make()
        if is_plain:
            yield PlainEngine(model, torch.optim.SGD(model.parameters(), lr=0.1))
        else:
            yield initialize(model=model, config=config_of(stage))[0]


def trained(engine: Any) -> Tensor:
    """All weights after a few updates."""
    for seed in range(3):
        engine.backward(engine(torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))).square().mean())
        engine.step()
    with gathered(engine.module):
        return torch.cat([parameter.detach().reshape(-1) for parameter in engine.module.parameters()])


class WithEmpty(nn.Module):
    """Learned extra tokens, of which this model has none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.extra = nn.Parameter(torch.zeros(0, 3))
        self.prefix = nn.Parameter(torch.zeros(0, 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(torch.cat([self.prefix, x, self.extra]))
        return result


def run_empty(rank: int, stage: int, section: str, is_built_inside: bool) -> None:
    config = config_of(stage, **{section: {"enabled": True}})
    with Init(config_dict_or_path=config, enabled=is_built_inside):
        model = WithEmpty()
    engine = initialize(model=model, config=config)[0]
    dtype = torch.bfloat16 if section == "bf16" else torch.float16
    for _ in range(2):
        output = engine(torch.ones(4, 3, dtype=dtype))
        assert output.dtype == dtype and {parameter.dtype for parameter in model.parameters()} == {dtype}
        engine.backward(output.float().mean())
        engine.step()


def test_empty_parameters_have_the_dtype_of_the_others() -> None:
    """A prompt of length zero was concatenated with hidden values. At stage 3 nothing shards an empty parameter, and so
    it kept fp32 in a bf16 model: the result was fp32, and the next layer failed. Other stages cast it."""
    cases = [(stage, "bf16", False) for stage in (2, 3)]
    run_each(run_empty, 2, [*cases, (3, "bf16", True), (3, "fp16", False)])


def run_late_hook(rank: int, stage: int) -> None:
    """What hooks see in each of three backward passes: norms of all parameters' gradients."""
    found = []
    for engine in engines_of(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), stage):
        seen: list[tuple[str, float]] = []

        def see(name: str, parameter: nn.Parameter, seen: list[Any] = seen) -> None:
            assert parameter.grad is not None, f"{name} has no gradient any more"
            seen.append((name, round(float(parameter.grad.norm()), 5)))

        for name, parameter in engine.module.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: see(name, parameter))
        weights = trained(engine)
        found.append((sorted(seen), weights))
    (plainly, expected), (seen_by_hooks, weights) = found
    assert seen_by_hooks == plainly
    torch.testing.assert_close(weights, expected)


def test_a_hook_that_is_registered_after_initialize_sees_the_gradient() -> None:
    """A monitor registered `register_post_accumulate_grad_hook` once training had begun. Ours came first, and took the
    gradients when a bucket was complete: the hook got None for the last parameter of each, at stage 3 of each layer."""
    run_each(run_late_hook, 2, [(0,), (2,), (3,)])


class Scripted(nn.Module):
    def __init__(self, is_scripted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, last = nn.Linear(3, 3), nn.Linear(3, 3)
        middle = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        blocks = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is deprecated
            self.middle = torch.jit.script(middle) if is_scripted else middle
            self.blocks = nn.ModuleList(torch.jit.script(each) if is_scripted else each for each in blocks)
            self.last = torch.jit.trace(last, torch.ones(1, 3)) if is_scripted else last

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.last(x)
        return result


def run_scripted(rank: int) -> list[Tensor]:
    found = []
    for is_scripted in (False, True):
        found.append(trained(initialize(model=Scripted(is_scripted), config=config_of(3))[0]))
    with pytest.raises(ValueError, match=r"is a torch\.jit\.ScriptModule.* use torch\.compile, or stage 2"):
        initialize(model=torch.jit.script(nn.Linear(3, 3)), config=config_of(3))
    return found


def test_scripted_parts_train_like_others() -> None:
    """A model with a scripted layer worked at stage 2 and failed at stage 3 in `initialize`, with torch's error about
    hooks that does not say which module: "register_forward_pre_hook is not supported on ScriptModules"."""
    for plain, scripted in run_ranks(run_scripted, 2):
        torch.testing.assert_close(scripted, plain)


def with_a_leaf() -> nn.Module:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), nn.Linear(3, 2))
    set_z3_leaf_modules(model[0], [nn.Sequential])
    return model


def run_leaf(rank: int) -> list[Tensor]:
    return [trained(engine) for engine in engines_of(with_a_leaf)]


def test_a_leaf_module_may_get_inputs_without_gradient() -> None:
    """The first layers of a model, whose input is data, were a leaf module: DeepSpeed's hooks take a tensor that
    requires a gradient from the module's inputs, and fail in forward if there is none."""
    for plain, leaf in run_ranks(run_leaf, 2):
        torch.testing.assert_close(leaf, plain)


def test_leaf_modules_by_name_say_what_is_missing() -> None:
    """DeepSpeed returns (modules, names without a module), and callers unpack it; hf_zero returned a list."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU(), nn.Linear(1, 1)))
    assert set_z3_leaf_modules_by_name(model, ["0", "9"], raise_if_not_found=False) == ([model[0]], ["9"])
    assert set_z3_leaf_modules_by_suffix(model, [".1", ".0"]) == ([model[1][1], model[1][0]], [])
    assert get_z3_leaf_modules(model) == [model[0], model[1][0], model[1][1]]
    assert set_z3_leaf_modules_by_suffix(model, [".1"], flag=False) == ([model[1][1]], [])
    assert get_z3_leaf_modules(model) == [model[0], model[1][0]]
    with pytest.raises(ValueError, match=r"\['x'\] match no module"):
        set_z3_leaf_modules_by_name(model, ["1", "x"])
