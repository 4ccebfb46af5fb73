"""Every optimizer compared with its reference over 200 steps: torch, formulas in float64, or a real DeepSpeed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.optim.adagrad import DeepSpeedCPUAdagrad
from hf_zero.optim.adam import DeepSpeedCPUAdam, FusedAdam
from hf_zero.optim.adam8 import Adam8bit, AdamW8bit
from hf_zero.optim.lamb import FusedLamb
from hf_zero.optim.lion import DeepSpeedCPULion, FusedLion
from hf_zero.optim.traits import Sees, traits_of
from tests.config.deepspeed_answers import ask_deepspeed
from tests.optim.shards import run_alone, run_sharded, runs_natively

STEPS = 200
SHAPES = [(7, 5), (11,), (3, 2, 4), (1,)]


def made_up(num_steps: int = STEPS) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Weights, and gradients by step: noise around a drift, so that momentum matters."""
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    drift = [0.3 * torch.randn(shape, generator=generator) for shape in SHAPES]
    steps = [[mean + torch.randn(mean.shape, generator=generator) for mean in drift] for _ in range(num_steps)]
    return weights, steps


def alone(kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> list[Tensor]:
    return run_alone(kind, options, *made_up())


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 2e-5) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.to(mine.dtype), rtol=tolerance, atol=tolerance)


def lion_in_double(lr: float, betas: tuple[float, float], weight_decay: float) -> list[Tensor]:
    weights, steps = made_up()
    done = []
    for index, weight in enumerate(weights):
        p, m = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
        for gradients in steps:
            g = gradients[index].double()
            p = p * (1 - lr * weight_decay) - lr * torch.sign(betas[0] * m + (1 - betas[0]) * g)
            m = betas[1] * m + (1 - betas[1]) * g
        done.append(p)
    return done


def lamb_in_double(lr: float = 1e-2, weight_decay: float = 0.0, **options: Any) -> list[Tensor]:
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    eps, inside = options.get("eps", 1e-8), options.get("eps_inside_sqrt", False)
    weights, steps = made_up()
    done = []
    for index, weight in enumerate(weights):
        p, m, v = weight.double(), torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        for count, gradients in enumerate(steps, start=1):
            g = gradients[index].double()
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            u = m / ((v + eps).sqrt() if inside else v.sqrt() + eps) + weight_decay * p
            ratio = float(p.norm() / u.norm())
            ratio = min(max(ratio, options.get("min_coeff", 0.01)), options.get("max_coeff", 10.0))
            rate = lr
            if options.get("bias_correction", True):
                rate *= math.sqrt(1 - beta2**count) / (1 - beta1**count)
            p = p - rate * ratio * u
        done.append(p)
    return done


LAMBS: list[dict[str, Any]] = [
    {"lr": 1e-2, "weight_decay": 0.1},
    {"lr": 1e-2, "bias_correction": False, "eps": 1e-6, "eps_inside_sqrt": True, "betas": (0.8, 0.99)},
    {"lr": 1e-2, "max_coeff": 0.3, "min_coeff": 0.2},
]


@pytest.mark.parametrize("options", LAMBS)
def test_lamb_against_its_formulas(options: dict[str, Any]) -> None:
    assert_close(alone(FusedLamb, options), lamb_in_double(**options))


def test_lamb_keeps_a_tensor_of_zeros_moving() -> None:
    """A norm of 0 gives a ratio of 1, and the ratios are accessible."""
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))]
    optimizer = FusedLamb(parameters, lr=0.1, bias_correction=False)
    parameters[0].grad, parameters[1].grad = torch.ones(3), torch.zeros(3)
    optimizer.step()
    assert optimizer.get_lamb_coeffs() == [1.0, 1.0]
    assert torch.all(parameters[0] < 0) and torch.equal(parameters[1], torch.ones(3))


@pytest.mark.parametrize("kind", [FusedLion, DeepSpeedCPULion])
def test_lion_against_its_formulas(kind: Any) -> None:
    expected = lion_in_double(1e-3, (0.9, 0.99), 0.1)
    assert_close(alone(kind, {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}), expected)


def test_lion_leaves_an_element_without_any_gradient_where_it_is() -> None:
    """DeepSpeed's GPU Lion treats an exact zero as negative and moves such an element up, its CPU Lion down."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = FusedLion([parameter], lr=0.5)
    parameter.grad = torch.tensor([0.0, 1.0])
    optimizer.step()
    assert parameter.tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("kind", "own", "theirs", "options"),
    [
        (FusedAdam, {}, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        (FusedAdam, {}, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.0}),
        (FusedAdam, {"adam_w_mode": False}, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
        (FusedAdam, {}, torch.optim.Adam, {"lr": 0.01, "betas": (0.7, 0.9), "eps": 1e-4}),
        (DeepSpeedCPUAdam, {}, torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        (DeepSpeedCPUAdam, {"adamw_mode": False}, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
        (DeepSpeedCPUAdagrad, {}, torch.optim.Adagrad, {"lr": 0.05, "weight_decay": 0.1}),
    ],
)
def test_the_same_as_torch(kind: Any, own: dict[str, Any], theirs: Any, options: dict[str, Any]) -> None:
    assert_close(alone(kind, {**options, **own}), alone(theirs, options), 1e-4)


ON_SHARDS: list[tuple[Any, dict[str, Any]]] = [
    (FusedAdam, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 0.5}),
    (DeepSpeedCPUAdagrad, {"lr": 0.05}),
    (torch.optim.SGD, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    (FusedLion, {"lr": 1e-3, "weight_decay": 0.1}),
    *((FusedLamb, options) for options in LAMBS),
]


@pytest.mark.lengthy
@pytest.mark.parametrize("num_steps", [40, pytest.param(STEPS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("kind", "options"), ON_SHARDS)
def test_on_shards_as_alone(kind: Any, options: dict[str, Any], world: int, num_steps: int) -> None:
    """Shard boundaries divide parameters; LAMB's trust ratio must still be that of the whole parameter."""
    run = (kind, options, *made_up(num_steps))
    assert_close(run_sharded(*run, world), run_alone(*run))


def test_state_can_be_saved_and_restored() -> None:
    for kind in (FusedAdam, FusedLion, FusedLamb, DeepSpeedCPUAdagrad, DeepSpeedCPUAdam):
        parameter = nn.Parameter(torch.ones(4))
        optimizer = kind([parameter], lr=0.1)
        parameter.grad = torch.ones(4)
        optimizer.step()
        other = nn.Parameter(parameter.detach().clone())
        restored = kind([other], lr=0.1)
        restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for candidate, runner in ((parameter, optimizer), (other, restored)):
            candidate.grad = torch.full((4,), 2.0)
            runner.step()
        assert torch.equal(parameter, other) and not torch.equal(parameter, torch.ones(4))


def test_a_step_that_deepspeed_saved_as_a_number() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([parameter], lr=0.1)
    optimizer.state[parameter].update(step=3, exp_avg=torch.zeros(4), exp_avg_sq=torch.zeros(4))
    parameter.grad = torch.ones(4)
    optimizer.step()
    assert int(optimizer.state[parameter]["step"]) == 4


def test_16_bit_parameters_keep_32_bit_states_in_the_cpu_names() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    for kind, dtype in ((DeepSpeedCPUAdam, torch.float32), (FusedAdam, torch.bfloat16)):
        optimizer = kind([parameter], lr=0.1)
        parameter.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step()
        assert optimizer.state[parameter]["exp_avg"].dtype == dtype
        assert set(optimizer.state[parameter]) == {"step", "exp_avg", "exp_avg_sq"}, "torch's names"


def test_a_parameter_that_is_not_contiguous() -> None:
    """A transposed matrix has no flat view; the update must change the parameter and not a copy."""
    for kind in (FusedAdam, FusedLion, FusedLamb, AdamW8bit):
        plain, transposed = nn.Parameter(torch.arange(6.0).view(2, 3)), nn.Parameter(torch.arange(6.0).view(2, 3))
        transposed.data = torch.arange(6.0).view(2, 3).t().contiguous().t()
        assert not transposed.is_contiguous()
        for parameter in (plain, transposed):
            parameter.grad = torch.arange(6.0).view(2, 3) + 1
            kind([parameter], lr=0.1).step()
        torch.testing.assert_close(plain.detach(), transposed.detach())
        assert not torch.equal(plain, torch.arange(6.0).view(2, 3))


def test_arguments_that_make_no_sense() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        FusedAdam(parameters, amsgrad=True)
    with pytest.raises(TypeError, match="unexpected keyword argument .momentum."):
        FusedAdam(parameters, momentum=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"betas in \[0, 1\), got .*betas=\(0.9, 1.0\)"):
        FusedAdam(parameters, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="FusedLion needs lr, weight_decay >= 0 and betas in .*, got lr=-1"):
        FusedLion(parameters, lr=-1)
    with pytest.raises(ValueError, match="amsgrad=True is not supported by FusedLamb"):
        FusedLamb(parameters, amsgrad=True)
    with pytest.raises(ValueError, match="set gradient_clipping in ds.json instead"):
        FusedLamb(parameters, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="DeepSpeedCPUAdagrad needs lr, eps, weight_decay >= 0, got lr=nan"):
        DeepSpeedCPUAdagrad(parameters, lr=math.nan)


def test_what_runs_natively() -> None:
    parameters = [nn.Parameter(torch.ones(1))]

    class MyLamb(FusedLamb):
        """May do something else."""

    class MyAdamW(torch.optim.AdamW):
        """May do something else."""

    hooked = torch.optim.AdamW(parameters)
    hooked.register_step_post_hook(lambda *_: None)
    kinds = [*(kind for kind, _ in ON_SHARDS), AdamW8bit, Adam8bit]
    assert all(runs_natively(kind(parameters, lr=0.1)) for kind in kinds)
    assert runs_natively(torch.optim.Adam(parameters, fused=True))
    assert not runs_natively(hooked), "the hook would not be called"
    assert not runs_natively(MyAdamW(parameters))
    assert not runs_natively(torch.optim.AdamW(parameters, amsgrad=True))
    assert not runs_natively(torch.optim.AdamW(parameters, maximize=True))
    assert not runs_natively(torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1))
    assert not runs_natively(torch.optim.SGD(parameters, lr=0.1, maximize=True))
    assert not runs_natively(torch.optim.Adagrad(parameters, maximize=True))
    assert not runs_natively(MyLamb(parameters)) and traits_of(MyLamb(parameters)).sees is Sees.WHOLE_TENSORS
    assert traits_of(FusedLamb(parameters)).sees is not Sees.WHOLE_TENSORS


# DeepSpeed compiles these operators on first use, which takes minutes once.
ORACLE_PROGRAM = """
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.lion import DeepSpeedCPULion
kinds = {kind.__name__: kind for kind in (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion)}
answer = []
for name, options in given["cases"]:
    parameters = [torch.nn.Parameter(torch.tensor(weight)) for weight in given["weights"]]
    optimizer = kinds[name](parameters, **options)
    for gradients in given["steps"]:
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = torch.tensor(gradient)
        optimizer.step()
    answer.append([parameter.tolist() for parameter in parameters])
"""
ORACLE_CASES: list[tuple[str, dict[str, Any]]] = [
    ("DeepSpeedCPUAdam", {"lr": 0.01, "weight_decay": 0.1}),
    ("DeepSpeedCPUAdam", {"lr": 0.01, "weight_decay": 0.1, "adamw_mode": False, "betas": [0.8, 0.99], "eps": 1e-4}),
    ("DeepSpeedCPUAdagrad", {"lr": 0.05, "weight_decay": 0.1}),
    ("DeepSpeedCPULion", {"lr": 1e-3, "weight_decay": 0.1, "betas": [0.9, 0.99]}),
]


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_same_as_deepspeed(tmp_path: Path) -> None:
    weights, steps = made_up()
    given = {
        "cases": ORACLE_CASES,
        "weights": [weight.tolist() for weight in weights],
        "steps": [[gradient.tolist() for gradient in gradients] for gradients in steps],
    }
    kinds = {kind.__name__: kind for kind in (DeepSpeedCPUAdam, DeepSpeedCPUAdagrad, DeepSpeedCPULion)}
    answer = ask_deepspeed(ORACLE_PROGRAM, given, tmp_path, timeout_s=800)
    for (name, options), theirs in zip(ORACLE_CASES, answer, strict=True):
        assert_close(alone(kinds[name], options), [torch.tensor(weight) for weight in theirs], 1e-4)
