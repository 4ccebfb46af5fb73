"""Optimizer groups with different kinds of states, in every form of checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import initialize
from hf_zero.api.parameter_access import safe_get_full_fp32_param
from hf_zero.checkpoint.deepspeed.universal import convert_to_universal
from hf_zero.errors import CheckpointError


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.idle = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean()


def muon(model: Halves) -> dict[str, Any]:
    """Momentum for matrices, and Adam's moments for all other parameters."""
    return {"config": {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}}


def momentum_of_some(model: Halves) -> dict[str, Any]:
    groups = [
        {"params": [*model.first.parameters(), *model.idle.parameters()], "momentum": 0.0},
        {"params": list(model.second.parameters()), "momentum": 0.9},
    ]
    return {"optimizer": torch.optim.SGD(groups, lr=0.1)}


def an_idle_group(model: Halves) -> dict[str, Any]:
    """One half of the model has not been used by any batch so far."""
    used = [*model.first.parameters(), *model.second.parameters()]
    return {"optimizer": torch.optim.AdamW([{"params": used}, {"params": list(model.idle.parameters())}], lr=1e-2)}


def engine_of(stage: int, kind: Callable[[Halves], dict[str, Any]], **sections: Any) -> Any:
    model = Halves()
    given = kind(model)
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, **sections}
    return initialize(model=model, **{**given, "config": {**config, **given.get("config", {})}})[0]


def updates(engine: Any, numbers: range) -> dict[str, torch.Tensor]:
    for number in numbers:
        engine.backward(engine(torch.randn(4, 5, generator=torch.Generator().manual_seed(number))))
        engine.step()
    return {name: safe_get_full_fp32_param(value).clone() for name, value in engine.module.named_parameters()}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", [muon, momentum_of_some, an_idle_group])
def test_states_of_every_group_come_back(kind: Callable[[Halves], dict[str, Any]], stage: int, tmp_path: Path) -> None:
    """A user resumed a training with Muon, which silently continued with empty moments.

    Muon keeps a momentum for matrices and Adam's two moments for the rest. Loading dropped every kind of state that not
    all groups had, which was all three. The same happened to SGD with momentum in only some groups, and to every
    optimizer with a group that had never received a gradient.
    """
    whole = engine_of(stage, kind)
    updates(whole, range(3))
    whole.save_checkpoint(str(tmp_path), "saved")
    expected = updates(whole, range(3, 5))
    folders = [("saved", {})]
    if stage:
        convert_to_universal(tmp_path / "saved", tmp_path / "universal")
        folders.append(("universal", {"checkpoint": {"load_universal": True}}))
    for tag, sections in folders:
        for other in {stage, 3}:
            again = engine_of(other, kind, **sections)
            again.load_checkpoint(str(tmp_path), tag)
            found = updates(again, range(3, 5))
            assert [name for name in expected if not torch.equal(found[name], expected[name])] == [], (tag, other)


def test_a_file_that_is_gone_is_still_named(tmp_path: Path) -> None:
    engine = engine_of(2, muon)
    updates(engine, range(1))
    engine.save_checkpoint(str(tmp_path), "saved")
    convert_to_universal(tmp_path / "saved", tmp_path / "universal")
    (tmp_path / "universal" / "zero" / "second.bias" / "exp_avg.pt").unlink()
    again = engine_of(2, muon, checkpoint={"load_universal": True})
    with pytest.raises(CheckpointError, match="second.bias/exp_avg.pt.*is missing"):
        again.load_checkpoint(str(tmp_path), "universal")


@pytest.mark.parametrize("kind", [muon, an_idle_group])
def test_sub_groups_may_cut_parameters_at_stage_0(kind: Callable[[Halves], dict[str, Any]], tmp_path: Path) -> None:
    """A user offloaded the optimizer at stage 0, for a model with more elements than sub_group_size (1e9).

    Saving failed with "shape '[96, 24]' is invalid for input of size 1536": the writer took a sub-group's part of a
    parameter for the whole parameter.
    """
    zero = {"stage": 0, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 16}
    whole = engine_of(0, kind, zero_optimization=zero)
    updates(whole, range(3))
    whole.save_checkpoint(str(tmp_path), "saved")
    expected = updates(whole, range(3, 5))
    for sections in ({"zero_optimization": zero}, {}, {"zero_optimization": {"stage": 3}}):
        again = engine_of(0, kind, **sections)
        again.load_checkpoint(str(tmp_path), "saved")
        found = updates(again, range(3, 5))
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_parameter_outside_the_model_comes_back(bf16: bool, stage: int, tmp_path: Path) -> None:
    """A temperature that scales the loss is in the optimizer, but in no module that the engine knows.

    Stage 0 did not save it, and failed on loading with "has no '(outside the model) #6'".
    """

    def train(folder: Path | None = None) -> list[torch.Tensor]:
        model, temperature = Halves(), nn.Parameter(torch.tensor([0.7]))
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}}
        steps = torch.optim.AdamW([*model.parameters(), temperature], lr=1e-2)
        engine = initialize(model=model, optimizer=steps, config=config)[0]
        if folder is not None:
            engine.load_checkpoint(str(folder))
        for number in range(engine.global_steps, 5):
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(number))
            engine.backward(engine(inputs.to(model.first.weight.dtype)) * temperature.sum())
            engine.step()
            if number == 2 and folder is None:
                engine.save_checkpoint(str(tmp_path))
        return [safe_get_full_fp32_param(value).clone() for value in (*model.parameters(), temperature)]

    assert all(map(torch.equal, train(), train(tmp_path)))
