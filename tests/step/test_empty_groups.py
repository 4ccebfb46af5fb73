"""Optimizer groups that are empty or frozen, with a schedule that has a rate for each group."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from tests.support import beside_plain
from tests.support.beside_plain import assert_same, engine_of, plain_weights, train, train_plainly, weights_of
from tests.support.ranks import run_each

STEPS = 3
RATES = [0.5, 0.1, 0.02, 0.3]


def with_empty_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Groups: nothing, matrices, a frozen layer, the rest."""
    layers: Any = model
    groups = [[], [layers.into.weight, layers.out.weight], [*layers.frozen.parameters()]]
    groups.append([layers.into.bias, *layers.norm.parameters()])
    return torch.optim.SGD([{"params": each, "lr": rate} for each, rate in zip(groups, RATES, strict=True)])


def slower(number: int, step: int) -> float:
    return 1 / (1 + step * number)


def by_lambdas(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, [partial(slower, number) for number in range(len(RATES))])


def by_steps(optimizer: torch.optim.Optimizer) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


def run(rank: int, world: int, stage: int, bf16: bool, folder: str) -> dict[str, Any]:
    engine = engine_of(with_empty_groups, stage, world, bf16=bf16, schedule=by_lambdas)
    rates = [engine.get_lr() for _ in train(engine, rank, world, STEPS)]
    engine.save_checkpoint(folder)
    other = engine_of(with_empty_groups, stage, world, bf16=bf16, schedule=by_steps)
    for _ in train(other, rank, world, STEPS):
        pass
    other.save_checkpoint(f"{folder}/chained")
    again = engine_of(with_empty_groups, stage, world, bf16=bf16, schedule=by_lambdas)
    again.load_checkpoint(folder)
    loaded = again.get_lr(), weights_of(again)
    rates += [again.get_lr() for _ in train(again, rank, world, 1, STEPS)]
    chained = engine_of(with_empty_groups, stage, world, bf16=bf16, schedule=by_steps)
    chained.load_checkpoint(f"{folder}/chained")
    return {"rates": rates, "weights": weights_of(engine), "loaded": loaded, "chained": chained.get_lr()}


def expected() -> tuple[list[list[float]], list[dict[str, torch.Tensor]]]:
    model = beside_plain.Layers()
    optimizer = with_empty_groups(model)
    schedule, rates, weights = by_lambdas(optimizer), [], []
    for _ in train_plainly(model, optimizer, STEPS + 1, schedule=schedule):
        rates.append([group["lr"] for group in optimizer.param_groups])
        weights.append(plain_weights(model))
    return rates, weights


def test_groups_keep_their_number_and_place(tmp_path: Path) -> None:
    """A user trained a LoRA model with Trainer's two groups: no bias and no norm is trained, so the group without
    weight decay is empty. The Hugging Face schedule has a rate for each of the optimizer's groups, and the engine had
    removed the empty one: "zip() argument 2 is longer than argument 1" at the first update, or the rate of another
    group in the log."""
    check(2, [(2, 0, False, str(tmp_path / "0")), (2, 2, True, str(tmp_path / "2"))])


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_groups_at_every_stage(world: int, tmp_path: Path) -> None:
    check(world, [(world, s, bf16, str(tmp_path / f"{s}-{bf16}")) for s in range(4) for bf16 in (False, True)])


def check(world: int, cases: list[tuple[Any, ...]]) -> None:
    rates, weights = expected()
    for case, ranks in zip(cases, run_each(run, world, cases), strict=True):
        for result in ranks:
            assert result["rates"] == [pytest.approx(each) for each in rates], case
            assert result["loaded"][0] == pytest.approx(rates[STEPS - 1]), case
            assert_same(result["weights"], weights[STEPS - 1], bf16=case[2], what=str(case))
            assert_same(result["loaded"][1], result["weights"], what=str(case))
            assert result["chained"] == pytest.approx([rate * 0.5**STEPS for rate in RATES]), case
