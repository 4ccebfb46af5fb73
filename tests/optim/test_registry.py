"""Optimizers by their names in ds.json."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.config import ConfigError, OptimizerPolicy
from hf_zero.optim.adam import DeepSpeedCPUAdam, FusedAdam
from hf_zero.optim.adam8 import Adam8bit, AdamW8bit
from hf_zero.optim.lamb import FusedLamb
from hf_zero.optim.lion import DeepSpeedCPULion, FusedLion
from hf_zero.optim.registry import build_optimizer


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
        (("AdamW8bit", {"lr": 0.1, "betas": [0.8, 0.9], "block_size": 256}), AdamW8bit, {"lr": 0.1, "decoupled": True}),
        (("adam8bit", {}), Adam8bit, {"decoupled": False}),
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
