"""Optimizers of torchao and bitsandbytes, given by the client: they run as themselves on masters, at every stage.

Skipped where the packages are not installed. They keep quantised states per block of a tensor, so flat shards see other
blocks than whole parameters do; what must agree is where training goes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.entry import initialize
from tests.support.ranks import run_ranks
from tests.support.requirements import requires

STEPS, ROWS, WIDTH = 12, 8, 128
KINDS = ["torchao AdamW8bit", "torchao AdamW4bit", "bitsandbytes AdamW8bit", "bitsandbytes AdamW"]


def make(kind: str, parameters: Any) -> torch.optim.Optimizer:
    package, name = kind.split()
    if package == "torchao":
        import torchao.optim as home
    else:
        import bitsandbytes.optim as home
    return getattr(home, name)(parameters, lr=1e-3)  # type: ignore[no-any-return]


class Mirror(nn.Module):
    """Large enough for states to be quantised (4096 elements and more)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (self.out(self.into(x).relu()) - x.flip(-1)).square().mean()


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def plain(kind: str) -> list[float]:
    model = Mirror()
    optimizer, losses = make(kind, model.parameters()), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def run_engine(rank: int, kind: str, stage: int, world: int) -> list[float]:
    model = Mirror()
    config = {
        "train_micro_batch_size_per_gpu": ROWS // world,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine = initialize(model=model, optimizer=make(kind, model.parameters()), config=config)[0]
    losses = []
    for _ in range(STEPS):
        loss = engine(batch().chunk(world)[rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def run_plain(_rank: int, kind: str) -> list[float]:
    return plain(kind)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=requires(modules=(kind.split()[0],))) for kind in KINDS])
def test_as_themselves(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its update, which takes minutes on a CPU
    (expected,) = run_ranks(run_plain, 1, kind)
    (alone,) = run_ranks(run_engine, 1, kind, 0, 1)
    assert alone == pytest.approx(expected, rel=1e-5)
    for stage in (1, 3):
        ranks = run_ranks(run_engine, 2, kind, stage, 2)
        mean = [sum(losses) / 2 for losses in zip(*ranks, strict=True)]
        if "4bit" not in kind:  # there it matters which elements share a block
            assert mean == pytest.approx(expected, rel=0.02), stage
        assert mean[-1] < 1.02 * expected[-1] < 0.5 * mean[0], stage
