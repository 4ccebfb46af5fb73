"""torch.compile around and inside an engine: compiled models train like uncompiled ones."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import hf_zero
from hf_zero.comm.cpu import shared_memory
from tests.support.ranks import run_ranks

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.down(torch.nn.functional.gelu(self.up(self.norm(values))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return self.head(values).square().mean()


def losses(rank: int, stage: int, way: str, apart: bool) -> list[float]:
    counters.clear()
    torch.manual_seed(0)
    model: Any = Model()
    if way == "model":
        model = torch.compile(model, backend="aot_eager")
    if way == "blocks":
        for block in model.blocks:
            block.compile(backend="aot_eager")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 20,
            "stage3_max_live_parameters": 0,
        },
    }
    with mock.patch.object(shared_memory, "host_name", lambda: f"host {rank}" if apart else "host"):
        engine, *_ = hf_zero.initialize(model=model, config=config)
    if way == "engine":
        engine.compile(backend="aot_eager")
    found, num_graphs = [], []
    for step in range(6):
        generator = torch.Generator().manual_seed(2 * step + rank)
        loss = engine(torch.randn(2, WIDTH, generator=generator))
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
        num_graphs.append(counters["stats"]["unique_graphs"])
        if step == 3:
            engine.eval()
            with torch.no_grad():
                found.append(engine(torch.ones(2, WIDTH)).item())
            engine.train()
            evaluated = counters["stats"]["unique_graphs"]
    # Nothing is compiled again after the first update, except once for evaluation.
    assert num_graphs[2:4] == num_graphs[1:2] * 2 and num_graphs[4:] == [evaluated] * 2, (way, num_graphs, evaluated)
    assert num_graphs[0] or way != "model"  # the others may use what has been compiled for it
    return found


def run_ways(rank: int, stage: int, apart: bool) -> dict[str, list[float]]:
    return {way: losses(rank, stage, way, apart) for way in ("not", "model", "blocks", "engine")}


def check(stage: int, apart: bool) -> None:
    for found in run_ranks(run_ways, 2, stage, apart, timeout_s=250):
        for way in ("model", "blocks", "engine"):
            assert found[way] == pytest.approx(found["not"], rel=1e-6), way


def test_several_compiled_models_in_one_process() -> None:
    """Stage 3's hooks run between compiled parts. The compiler also compiled the function around each hook, once per
    hook, and beyond its limit called something that did not exist yet: with the third model of a process, forward
    failed with "'NoneType' object is not callable"."""
    check(3, False)


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "two hosts"])
@pytest.mark.parametrize("stage", range(4))
def test_what_is_compiled_trains_as_what_is_not(stage: int, apart: bool) -> None:
    check(stage, apart)
