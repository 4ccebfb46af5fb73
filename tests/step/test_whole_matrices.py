"""Optimizers that need whole matrices in the engine: at every stage like plain PyTorch."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from hf_zero import initialize
from hf_zero.comm import ledger
from hf_zero.config import ConfigError
from hf_zero.optim.adafactor import AdafactorUpdater
from hf_zero.optim.traits import keepers
from hf_zero.optim.updater import Spread, WholeStepUpdater
from tests.optim.test_adafactor import OPTIONS
from tests.step.training import ROWS, config, groups_of, split
from tests.support.models import AwkwardMLP, mlp_batches
from tests.support.ranks import run_each, run_ranks

STEPS = 4


def made(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kind, options = OPTIONS[name]
    return kind(groups_of(model, options.get("weight_decay", 0.0)), **options)


def plain(name: str) -> list[float]:
    """The losses of one process."""
    model = AwkwardMLP()
    optimizer, losses = made(name, model), []
    for number, batch in enumerate(mlp_batches(STEPS, ROWS)):
        optimizer.zero_grad()
        loss = model(**batch, flag=number % 2 == 1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_all(rank: int, world: int, stage: int, sections: dict[str, Any]) -> dict[str, list[float]]:
    """The losses of this rank, by name of the options."""
    found = {}
    for name in OPTIONS:
        model = AwkwardMLP()
        settings = config(stage, world, gradient_clipping=0.5, **sections)
        engine, _, _, _ = initialize(model=model, optimizer=made(name, model), config=settings)
        assert type(engine.optimizer.updater) is (AdafactorUpdater if stage and world > 1 else WholeStepUpdater)
        found[name] = []
        for number, batch in enumerate(mlp_batches(STEPS, ROWS)):
            loss = engine(**split(batch, rank, world), flag=number % 2 == 1)
            engine.backward(loss)
            engine.step()
            found[name].append(loss.item())
    return found


@pytest.mark.parametrize(
    ("stage", "world"),
    [(3, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2, 2), (1, 2), (3, 2), (1, 3)))],
)
def test_adafactor_with_all_its_options(stage: int, world: int) -> None:
    """The model includes parameters that no rank uses, or only sometimes, a scalar and a frozen layer."""
    ranks = run_ranks(run_all, world, world, stage, {})
    for name in OPTIONS:
        mean = [sum(losses) / world for losses in zip(*(found[name] for found in ranks), strict=True)]
        assert mean == pytest.approx(plain(name), rel=1e-5), name


def test_who_keeps_what() -> None:
    """Large ones are assigned first, each to the least loaded rank; the same on all ranks."""
    spread = [Spread((2, 3), ()), Spread((10,), (5,)), Spread((), ()), Spread((3, 3), (4,))]
    assert keepers(spread, 2) == [1, 0, 0, 1] and keepers(spread, 1) == [0] * 4


def run_traffic(rank: int, stage: int) -> list[tuple[int, int]]:
    """Small sums of a step, by kind: (calls, bytes)."""
    found = []
    for kind in (torch.optim.AdamW, Adafactor):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 50), nn.Tanh(), nn.Linear(50, 64))
        options = {"lr": 1e-3} if kind is torch.optim.AdamW else {}
        engine, *_ = initialize(
            model=model, optimizer=kind(model.parameters(), **options), config=config(stage, 2, bf16={"enabled": True})
        )
        ledger.reset()
        engine.backward(engine(torch.randn(4, 64).bfloat16()).square().mean())
        engine.step()
        sums = ledger.tally("control", "all_reduce")
        found.append((sums.calls, sums.num_bytes))
        assert ledger.tally("step", "all_reduce").calls == 0
    return found


def test_two_small_sums_per_step() -> None:
    """They sum rows and columns of partitioned matrices, and one number per parameter, for any number of parameters."""
    for (calls, num_bytes), (their_calls, their_bytes) in chain(*run_each(run_traffic, 2, [(1,), (3,)])):
        assert their_calls == calls + 2
        # Both halves of a matrix have all of its columns; a partition boundary is within one row at most.
        assert their_bytes - num_bytes <= 4 * (2 * 4 + 64 + 50 + 2)


def offload(device: str, folder: str) -> dict[str, Any]:
    return {"offload_optimizer": {"device": device, "nvme_path": folder, "buffer_count": 4}}


def run_offloaded(rank: int, device: str, folder: str) -> tuple[list[float], list[float]]:
    """The same run with and without offload."""
    found = []
    for zero in ({}, offload(device, folder)):
        model = AwkwardMLP()
        settings = config(3, 2, bf16={"enabled": True})
        settings["zero_optimization"] |= zero
        engine, *_ = initialize(model=model, optimizer=made("momentum", model), config=settings)
        losses = []
        for number, batch in enumerate(mlp_batches(STEPS, ROWS)):
            mine = {key: value.bfloat16() for key, value in split(batch, rank, 2).items()}
            loss = engine(**mine, flag=number % 2 == 1)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.destroy()
        found.append(losses)
    return found[0], found[1]


def test_offload_changes_nothing(tmp_path: Path) -> None:
    for device in run_each(run_offloaded, 2, [("cpu", str(tmp_path)), ("nvme", str(tmp_path))]):
        assert all(at_hand == offloaded for at_hand, offloaded in device)


@pytest.mark.parametrize(("kind", "lacks"), [("LBFGS", "a closure"), ("SparseAdam", "sparse gradients")])
@pytest.mark.parametrize("stage", [0, 2])
def test_what_cannot_work_is_refused_at_once(kind: str, lacks: str, stage: int) -> None:
    model = nn.Linear(3, 3)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=f"optimizer = .*{kind}[^$]*needs {lacks}"):
        initialize(model=model, optimizer=optimizer, config=config(stage, 1))


def test_an_optimizer_that_makes_its_own_rate() -> None:
    """`Adafactor(relative_step=True)` has lr=None, and recording the rate of an update failed."""
    model = nn.Linear(3, 3)
    engine, optimizer, *_ = initialize(model=model, optimizer=Adafactor(model.parameters()), config=config(1, 1))
    before = model.weight.detach().clone()
    engine.backward(engine(torch.ones(ROWS, 3)).square().mean())
    engine.step()
    assert not torch.equal(before, model.weight) and engine.get_lr() == [None] and optimizer.get_lr() is None
