"""Muon compared with its formulas in float64, alone and on shards that divide matrices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.config import ConfigError, OptimizerPolicy
from hf_zero.optim.muon import Muon, direction, orthogonal
from hf_zero.optim.registry import build_optimizer
from hf_zero.optim.traits import Sees, traits_of
from tests.optim.shards import run_alone, run_sharded

STEPS = 200
SHAPES = [(7, 5), (4, 9), (3, 2, 4), (3, 2, 2, 2)]


def made_up() -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    steps = [[torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(STEPS)]
    return weights, steps


def in_double(lr: float, momentum: float, weight_decay: float) -> list[Tensor]:
    """The formulas, applied to one matrix after the other."""
    weights, steps = made_up()
    done = []
    for index, weight in enumerate(weights):
        p, m = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
        for gradients in steps:
            g = gradients[index].double()
            m = momentum * m + (1 - momentum) * g
            u = (1 - momentum) * g + momentum * m
            matrices = u.reshape(1, u.shape[0], -1) if u.dim() != 3 else u
            results = []
            for matrix in matrices:
                x = matrix / matrix.norm()
                flip = x.shape[0] > x.shape[1]
                x = x.T if flip else x
                for _ in range(5):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                x = x.T if flip else x
                results.append(x * math.sqrt(max(1, matrix.shape[0] / matrix.shape[1])))
            p = p * (1 - lr * weight_decay) - lr * torch.stack(results).reshape(p.shape)
        done.append(p)
    return done


def muon(params: list[nn.Parameter], **options: Any) -> Muon:
    return Muon([{"params": params, "use_muon": True}], **options)


OPTIONS = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}


def test_against_its_formulas() -> None:
    for ours, theirs in zip(run_alone(muon, OPTIONS, *made_up()), in_double(**OPTIONS), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("world", [2, 3])
def test_on_shards_as_alone(world: int) -> None:
    run = (muon, OPTIONS, *made_up())
    for ours, theirs in zip(run_sharded(*run, world), run_alone(*run), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_singular_values_come_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((30, 20), (20, 30)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert 0.5 < float(values.min()) and float(values.max()) < 1.3
    assert torch.equal(direction(torch.zeros(3, 3)), torch.zeros(3, 3))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.layer, self.lm_head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)


def test_matrices_are_chosen_by_name_and_shape() -> None:
    model = Small()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = Muon.groups_for([{"params": list(model.parameters()), "weight_decay": 0.3}], names)
    chosen = [[names[id(parameter)] for parameter in group["params"]] for group in groups]
    assert chosen == [["layer.weight"], ["embed_tokens.weight", "layer.bias", "lm_head.weight", "lm_head.bias"]]
    built = build_optimizer(OptimizerPolicy(type="Muon", params={"muon_lr": 0.5, "lr": 0.1}), groups, names)
    assert type(built) is Muon and traits_of(built).sees is not Sees.WHOLE_TENSORS
    assert [(group["use_muon"], group["lr"], group["weight_decay"]) for group in built.param_groups] == [
        (True, 0.5, 0.3),
        (False, 0.1, 0.3),
    ]
    defaults = build_optimizer(OptimizerPolicy(type="muon", params={}), [{"params": list(model.parameters())}], names)
    assert [group["lr"] for group in defaults.param_groups] == [0.02, 3e-4]
    assert defaults.param_groups[1]["betas"] == (0.9, 0.95) and defaults.param_groups[1]["eps"] == 1e-10


def test_what_is_no_matrix_gets_adam() -> None:
    ours, theirs = (nn.Parameter(torch.arange(5.0)) for _ in range(2))
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}
    optimizers = [Muon([ours], lr=0.1), torch.optim.AdamW([theirs], **options)]
    for step in range(20):
        ours.grad, theirs.grad = (torch.arange(5.0) - step for _ in range(2))
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_wrong_arguments() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(ValueError, match='ns_method=.svd.*"gram" and "standard" exist'):
        Muon(parameters, ns_method="svd")
    with pytest.raises(TypeError, match="unknown arguments: nesterov"):
        Muon(parameters, nesterov=True)
    with pytest.raises(ConfigError, match="unknown arguments: nesterov"):
        build_optimizer(OptimizerPolicy(type="Muon", params={"nesterov": True}), [{"params": parameters}])
