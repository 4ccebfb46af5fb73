"""Optimizers and programs that change weights outside of a step: schedule-free, Lookahead, clipping of masters."""

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
    batch,
    engine_of,
    plain_weights,
    train,
    train_plainly,
    weights_of,
)
from tests.support.own_optimizers import Lookahead, ScheduleFree
from tests.support.ranks import run_each

STEPS = 3
Weights = dict[str, Tensor]


def schedule_free(model: nn.Module) -> torch.optim.Optimizer:
    return ScheduleFree([p for p in model.parameters() if p.requires_grad])


def lookahead(model: nn.Module) -> torch.optim.Optimizer:
    return Lookahead([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """One of the classes whose step the engine replaces by its own kernels."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.9)


def clip_masters(optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.2, 0.2)


def act(way: str, optimizer: Any, mode: str) -> None:
    """Do what the program does with its optimizer before training, and after it."""
    base = getattr(optimizer, "optimizer", optimizer)
    if way == "clip" and mode == "eval":
        clip_masters(optimizer)
    elif way == "sync" and mode == "eval":
        base.sync()
    elif way in ("own", "base"):
        getattr(optimizer if way == "own" else base, mode)()


MAKES = {"own": schedule_free, "base": schedule_free, "sync": lookahead, "clip": fused}


def evaluated(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        loss: Tensor = model(x)
    return loss.double()


def run(
    rank: int, world: int, stage: int, way: str, bf16: bool, sections: dict[str, Any], folder: str
) -> tuple[list[Weights], list[Tensor]]:
    engine = engine_of(MAKES[way], stage, world, bf16=bf16, **sections)
    weights, losses = [], []
    for first in (0, STEPS):
        for step in range(STEPS):
            act(way, engine.optimizer, "train")
            for _ in train(engine, rank, world, 1, first + step):
                pass
        act(way, engine.optimizer, "eval")
        losses.append(evaluated(engine, batch(99)))
        weights.append(weights_of(engine))
    if folder:
        act(way, engine.optimizer, "train")
        act(way, engine.optimizer, "eval")
        engine.save_checkpoint(folder)
        again = engine_of(MAKES[way], stage, world, bf16=bf16, **sections)
        again.load_checkpoint(folder)
        losses.append(evaluated(again, batch(99)))
    return weights, losses


@functools.cache
def expected(way: str) -> tuple[list[Weights], list[Tensor]]:
    model = Layers()
    optimizer = MAKES[way](model)
    weights, losses = [], []
    for first in (0, STEPS):
        act(way, optimizer, "train")
        for _ in train_plainly(model, optimizer, STEPS, first):
            pass
        act(way, optimizer, "eval")
        losses.append(evaluated(model, batch(99)))
        weights.append(plain_weights(model))
    return weights, losses


def check(world: int, cases: list[tuple[Any, ...]]) -> None:
    for case, ranks in zip(cases, run_each(run, world, cases), strict=True):
        known, known_losses = expected(case[2])
        for weights, losses in ranks:
            for now, then in zip(weights, known, strict=True):
                assert_same(now, then, bf16=case[3], what=str(case))
            for loss, other in zip(losses, [*known_losses, known_losses[-1]], strict=False):
                assert float(loss) == pytest.approx(float(other), rel=0.02 if case[3] else 1e-5), case


def test_weights_changed_outside_of_a_step_reach_all_ranks(tmp_path: Path) -> None:
    """A user trained with `optim="schedule_free_adamw"`. Trainer calls `optimizer.eval()` before an evaluation, which
    moves the weights; the engine's optimizer did not have it. Called on the user's own optimizer it moved each rank's
    part only: the evaluation and the saved model were a mixture (loss 4.3088 for 4.2822), and in bf16 nothing moved."""
    whole = {"hf_zero": {"optimizer_sees": "whole_tensors"}}
    nvme = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    cases: list[tuple[Any, ...]] = [
        (2, 1, "own", False, {}, str(tmp_path / "saved")),
        (2, 2, "base", False, {}, ""),
        (2, 2, "own", True, {}, ""),
        (2, 3, "own", False, {}, ""),
        (2, 3, "sync", False, {}, ""),
        (2, 0, "sync", True, {}, ""),
        (2, 2, "clip", False, {}, ""),
        (2, 2, "own", False, whole, ""),
        (2, 2, "own", False, nvme, ""),
    ]
    check(2, cases)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_way_at_every_stage(world: int, tmp_path: Path) -> None:
    cases: list[tuple[Any, ...]] = []
    rows = {"train_micro_batch_size_per_gpu": 8 // world} if world < 3 else {"train_micro_batch_size_per_gpu": 1}
    for way in MAKES:
        for stage in range(4):
            for bf16 in (False, True):
                cases.append((world, stage, way, bf16, rows, str(tmp_path / f"{way}-{stage}-{bf16}")))
    if world == 3:
        cases = [(*case[:5], "") for case in cases if case[2] != "clip"]
        for case, ranks in zip(cases, run_each(run, world, cases), strict=True):
            for weights, _ in ranks[1:]:
                for now, then in zip(weights, ranks[0][0], strict=True):
                    assert_same(now, then, what=str(case))
        return
    check(world, cases)
