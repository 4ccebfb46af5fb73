"""Optimizers of torchao and bitsandbytes passed by the user: they run unchanged on masters, at every stage.

Skipped if the packages are not installed. They quantize states per block of a tensor, and flat shards have different
blocks than whole parameters, so only the course of training must agree.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero import initialize
from tests.support.ranks import run_each, run_ranks
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
    """Large enough for quantized states (4096 elements and more)."""

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


def engine_of(kind: str, stage: int, world: int) -> Any:
    model = Mirror()
    config = {
        "train_micro_batch_size_per_gpu": ROWS // world,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    return initialize(model=model, optimizer=make(kind, model.parameters()), config=config)[0]


def train(engine: Any, rank: int, world: int) -> list[float]:
    losses = []
    for _ in range(STEPS):
        loss = engine(batch().chunk(world)[rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def beside_itself(rank: int, kind: str, stage: int) -> tuple[list[float], list[bool]]:
    """Losses, and after each step whether the masters equal those of the optimizer alone, on the same shards and
    gradients."""
    engine = engine_of(kind, stage, 2)
    base = engine.optimizer.optimizer
    masters = [parameter for group in base.param_groups for parameter in group["params"]]
    copies = [master.detach().clone().requires_grad_() for master in masters]
    alone, step, same = make(kind, copies), base.step, []

    def step_both(*arguments: Any, **options: Any) -> Any:
        for master, copy in zip(masters, copies, strict=True):
            copy.grad = None if master.grad is None else master.grad.clone()
        done = step(*arguments, **options)
        alone.step()
        same.append(all(torch.equal(master, copy) for master, copy in zip(masters, copies, strict=True)))
        return done

    base.step = step_both
    return train(engine, rank, 2), same


def in_one_process(_rank: int, kind: str) -> tuple[list[float], list[float]]:
    """Losses without and with an engine."""
    return plain(kind), train(engine_of(kind, 0, 1), 0, 1)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=requires(modules=(kind.split()[0],))) for kind in KINDS])
def test_as_themselves(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its update, which takes minutes on a CPU
    ((expected, alone),) = run_ranks(in_one_process, 1, kind)
    assert alone == pytest.approx(expected, rel=1e-5)
    for stage, ranks in zip((1, 3), run_each(beside_itself, 2, [(kind, 1), (kind, 3)]), strict=True):
        assert [same for _, same in ranks] == [[True] * STEPS] * 2, stage
        mean = [sum(losses) / 2 for losses in zip(*(losses for losses, _ in ranks), strict=True)]
        if "4bit" not in kind:  # there losses depend on which elements share a block; the bits above do not
            assert mean == pytest.approx(expected, rel=0.02), stage
        assert mean[-1] < 1.02 * expected[-1] < 0.5 * mean[0], stage
