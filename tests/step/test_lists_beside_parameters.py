"""Foreign optimizers whose param groups carry a list beside `params`, and those that fail on flat shards."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.beside_plain import (
    Layers,
    assert_same,
    engine_of,
    plain_weights,
    train,
    train_plainly,
    weights_of,
)
from tests.support.messages import heard
from tests.support.ranks import run_each

STEPS = 3
START = "optimizer: "
WHOLE: dict[str, Any] = {"hf_zero": {"optimizer_sees": "whole_tensors"}}


class Paired(torch.optim.Optimizer):
    """As LoRA-FA: a frozen matrix A before each B; B's gradient is projected by A; states are kept by name."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            before: Tensor | None = None
            for parameter, name, factor in zip(group["params"], group["names"], group["factors"], strict=True):
                if parameter.grad is not None:
                    state = self.state[name]
                    state.setdefault("moment", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
                    projected = state["moment"]
                    if before is not None and before.dim() == 2 and projected.shape[-1] == before.shape[0]:
                        projected = projected @ (before.float() @ before.float().T)
                    parameter.sub_(projected, alpha=factor * group["lr"])
                before = parameter


def paired(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    factors = [0.05 * (number + 1) for number in range(len(named))]
    group = {"params": [p for _, p in named], "names": [name for name, _ in named], "factors": factors}
    return Paired([group], {"lr": 1.0})


class Orthogonal(torch.optim.SGD):
    """Needs matrices: `torch.linalg.svd` of a vector fails."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                torch.linalg.svd(parameter.grad)


def orthogonal(model: nn.Module) -> torch.optim.Optimizer:
    return Orthogonal([p for p in model.parameters() if p.dim() == 2 and p.requires_grad], lr=0.1)


def run(rank: int, world: int, stage: int, bf16: bool, folder: str) -> Any:
    try:
        engine = engine_of(paired, stage, world, bf16=bf16)
    except ValueError as error:
        return str(error)
    for _ in train(engine, rank, world, STEPS):
        pass
    weights = weights_of(engine)
    engine.save_checkpoint(folder)
    again = engine_of(paired, stage, world, bf16=bf16)
    again.load_checkpoint(folder)
    for _ in train(again, rank, world, 1, STEPS):
        pass
    return weights, weights_of(again)


def run_failing(rank: int, world: int) -> tuple[str, list[str]]:
    with heard() as lines:
        engine = engine_of(orthogonal, 2, world)
        with pytest.raises(RuntimeError) as caught:
            for _ in train(engine, rank, world, 1):
                pass
        whole = engine_of(orthogonal, 2, world, **WHOLE)
        for _ in train(whole, rank, world, 1):
            pass
    shown = (line.strip() for text in lines for line in text.splitlines())
    return str(caught.value), [line[len(START) :] for line in shown if line.startswith(START)]


@functools.cache
def expected() -> list[dict[str, Tensor]]:
    model = Layers()
    return [plain_weights(model) for _ in train_plainly(model, paired(model), STEPS + 1)]


def check(world: int, cases: list[tuple[Any, ...]]) -> None:
    for case, ranks in zip(cases, run_each(run, world, cases), strict=True):
        for result in ranks:
            if world > 1 and case[1] > 0:
                assert "Paired" in result and "'names', 'factors'" in result and "stage 0" in result
                continue
            for weights, known in zip(result, expected()[-2:], strict=True):
                assert_same(weights, known, bf16=case[2], what=str(case))


def test_lists_follow_the_parameters_or_the_optimizer_is_refused(tmp_path: Path) -> None:
    """PEFT's LoRA-FA pairs each B with the frozen A before it in its group, and has names and scaling factors in lists
    beside `params`. The engine removed frozen parameters and turned the order around: a crash in PEFT at stage 0, and
    silently another algorithm at stage 2."""
    check(2, [(2, 0, False, str(tmp_path / "0")), (2, 0, True, str(tmp_path / "16")), (2, 2, False, "")])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_lists_at_every_stage(world: int, tmp_path: Path) -> None:
    check(world, [(world, s, bf16, str(tmp_path / f"{s}-{bf16}")) for s in range(4) for bf16 in (False, True)])


def test_an_error_on_flat_shards_names_the_way_out() -> None:
    """A user's own optimizer took the SVD of each gradient. At stage 2 it got flat shards, and failed with torch's
    words about a vector; nothing said that it could have whole tensors."""
    (ranks,) = run_each(run_failing, 2, [(2,)])
    for error, _ in ranks:
        assert "Orthogonal.step() failed on flat shards" in error and '"optimizer_sees": "whole_tensors"' in error
    assert ranks[0][1] == ["Orthogonal, sees flat shards (hf_zero.optimizer_sees)", "Orthogonal, sees whole tensors"]


def run_lora_fa(rank: int, world: int, stage: int, bf16: bool) -> Any:
    peft = pytest.importorskip("peft")
    from peft.optimizers import create_lorafa_optimizer

    def adapted() -> Any:
        torch.manual_seed(5)
        model = peft.get_peft_model(Layers(), peft.LoraConfig(r=2, target_modules=["into", "out"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.3)
        return model, create_lorafa_optimizer(model, r=2, lora_alpha=8, lr=0.02)

    from hf_zero import initialize
    from tests.support.beside_plain import config_of

    model, optimizer = adapted()
    engine = initialize(model=model, optimizer=optimizer, config=config_of(stage, world, bf16=bf16))[0]
    plain, own = adapted()
    for _ in zip(train(engine, rank, world, 4), train_plainly(plain, own, 4), strict=True):
        pass
    return weights_of(engine), plain_weights(plain)


@pytest.mark.slow
def test_lora_fa_of_peft() -> None:
    cases = [(2, 0, False), (2, 0, True)]
    for case, ranks in zip(cases, run_each(run_lora_fa, 2, cases), strict=True):
        for weights, known in ranks:
            # LoRA-FA itself computes its projection in bf16, in parts of batches with other roundings.
            assert_same(weights, known, bf16=True, what=str(case))
