"""FusedAdam alone, compared with torch's; and when the fused step may replace an optimizer's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.config import ConfigError, OptimizerPolicy
from hf_zero.layout import Piece
from hf_zero.optim.adam import DeepSpeedCPUAdam, FusedAdam
from hf_zero.optim.elementwise import StepCounts
from hf_zero.optim.lamb import FusedLamb
from hf_zero.optim.lion import DeepSpeedCPULion, FusedLion
from hf_zero.optim.registry import build_optimizer
from tests.optim.shards import runs_natively

STEPS = 200


def weights_after(kind: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 3))
    optimizer = kind(model.parameters(), **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 9, generator=generator)
        model(x).square().sum().backward()
        optimizer.step()
    return torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])


@pytest.mark.parametrize(
    ("ours", "kind", "theirs"),
    [
        ({"weight_decay": 0.1}, torch.optim.AdamW, {"weight_decay": 0.1}),
        ({"weight_decay": 0.0}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ({"weight_decay": 0.01, "adam_w_mode": False}, torch.optim.Adam, {"weight_decay": 0.01}),
        ({"betas": (0.7, 0.9), "eps": 1e-4}, torch.optim.Adam, {"betas": (0.7, 0.9), "eps": 1e-4}),
    ],
)
def test_200_steps_agree_with_torch(ours: dict[str, Any], kind: Any, theirs: dict[str, Any]) -> None:
    torch.testing.assert_close(
        weights_after(FusedAdam, lr=1e-2, **ours), weights_after(kind, lr=1e-2, **theirs), rtol=1e-4, atol=1e-5
    )


def test_its_state_has_torchs_names_and_can_be_restored() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([parameter], lr=0.1)
    parameter.grad = torch.ones(4)
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq"} and int(state["state"][0]["step"]) == 1
    other = nn.Parameter(parameter.detach().clone())
    restored = FusedAdam([other], lr=0.1)
    restored.load_state_dict(state)
    for candidate, runner in ((parameter, optimizer), (other, restored)):
        candidate.grad = torch.full((4,), 2.0)
        runner.step()
    assert torch.equal(parameter, other)


def test_a_closure_is_evaluated() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = FusedAdam([parameter], lr=0.1)

    def closure() -> torch.Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)  # type: ignore[arg-type]
    assert isinstance(loss, torch.Tensor) and loss.item() == 2.0
    assert torch.allclose(parameter, torch.full((2,), 0.9))


def test_wrong_arguments() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        FusedAdam(parameters, amsgrad=True)
    with pytest.raises(TypeError, match="unexpected keyword argument .momentum."):
        FusedAdam(parameters, momentum=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"betas in \[0, 1\), got .*betas=\(0.9, 1.0\)"):
        FusedAdam(parameters, betas=(0.9, 1.0))


def test_what_the_fused_step_may_stand_in_for() -> None:
    parameters = [nn.Parameter(torch.ones(1))]

    class Mine(torch.optim.AdamW):
        pass

    hooked = torch.optim.AdamW(parameters)
    hooked.register_step_post_hook(lambda *_: None)
    assert runs_natively(FusedAdam(parameters))
    assert runs_natively(torch.optim.AdamW(parameters)) and runs_natively(torch.optim.Adam(parameters, fused=True))
    assert not runs_natively(torch.optim.AdamW(parameters, amsgrad=True))
    assert not runs_natively(torch.optim.AdamW(parameters, maximize=True))
    assert not runs_natively(Mine(parameters)), "a subclass may do something else"
    assert not runs_natively(hooked), "the hook would not be called"


@pytest.mark.parametrize(
    ("policy", "kind", "options"),
    [
        (("AdamW", {"lr": 0.5}), FusedAdam, {"lr": 0.5, "weight_decay": 0.0, "decoupled": True}),
        (("adam", {}), FusedAdam, {"lr": 1e-3, "decoupled": True}),
        (("Adam", {"adam_w_mode": False}), FusedAdam, {"decoupled": False}),
        (("AdamW", {"adam_w_mode": False}), FusedAdam, {"decoupled": True}),
        (("AdamW", {"torch_adam": True}), torch.optim.AdamW, {"weight_decay": 0.01}),
        (("Adam", {"torch_adam": True, "adam_w_mode": False}), torch.optim.Adam, {"weight_decay": 0}),
        (("SGD", {"lr": 0.1, "momentum": 0.9}), torch.optim.SGD, {"momentum": 0.9}),
        (("FusedAdam", {"adam_w_mode": False}), FusedAdam, {"decoupled": False}),
        (("Adam", {"fp32_optimizer_states": True, "set_grad_none": True}), FusedAdam, {"decoupled": True}),
        (("CPUAdam", {"adam_w_mode": False}), DeepSpeedCPUAdam, {"decoupled": False}),
        (("Lamb", {"max_coeff": 0.5}), FusedLamb, {"max_coeff": 0.5, "weight_decay": 0.0}),
        (("fusedlamb", {}), FusedLamb, {"lr": 1e-3}),
        (("Lion", {"betas": (0.9, 0.99)}), FusedLion, {"betas": (0.9, 0.99)}),
        (("CPULion", {}), DeepSpeedCPULion, {"lr": 1e-3}),
        (("Adagrad", {"lr": 0.1}), torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-10}),
    ],
)
def test_types_of_ds_json(policy: tuple[str, dict[str, object]], kind: type, options: dict[str, Any]) -> None:
    built = build_optimizer(
        OptimizerPolicy(type=policy[0], params=policy[1]), [{"params": [nn.Parameter(torch.ones(1))]}]
    )
    assert type(built) is kind
    facts = {**built.param_groups[0], "decoupled": getattr(built, "adam_w_mode", None)}
    assert {name: facts[name] for name in options} == options


def test_a_type_nobody_has() -> None:
    for name in ("SGDD", "Optimizer", "lr_scheduler", "sgd"):
        with pytest.raises(
            ConfigError, match=rf"optimizer.type = '{name}'[\s\S]*neither one of our optimizers nor a class"
        ):
            build_optimizer(OptimizerPolicy(type=name, params={}), [])


def test_bias_correction_counts_per_parameter() -> None:
    """`a` and `b` are contiguous, `c` follows padding; runs are joined while their step counts agree."""
    pieces = (Piece(0, 0, 0, 32), Piece(1, 32, 0, 10), Piece(2, 64, 5, 7))
    counters = StepCounts()
    assert counters.advance(pieces, {0, 1, 2}) == [(0, 71, 1)]
    assert counters.advance(pieces, {0, 2}) == [(0, 32, 2), (64, 71, 2)]
    assert counters.advance(pieces, {0, 1, 2}) == [(0, 32, 3), (32, 42, 2), (64, 71, 3)]
    assert counters.advance(pieces, set()) == []
