"""Stage 3's costs, measured: gathers and reductions per step, live bytes between steps, peak within a step."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import initialize
from hf_zero.comm import ledger
from tests.step.test_traffic_and_memory import CONTROL, DEPTH, NUM_PARAMETERS, ROWS, SMALL_BYTES, WIDTH
from tests.support.late import VARIABLE
from tests.support.memory import kept_bytes, live_bytes, most_allocated, profiled_memory, shared_blocks
from tests.support.ranks import run_each, run_ranks
from tests.support.traffic import calls_and_bytes

LAYER_NUMEL = NUM_PARAMETERS // DEPTH
BYTES = 2 * NUM_PARAMETERS
EVERYTHING_RELEASED = {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}


class Stack(nn.Module):
    """A list of layers, each of them a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def engine_for(settings: dict[str, Any], accumulation: int = 1, *, model: nn.Module | None = None) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **settings},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    return initialize(model=model or Stack(), config=config)[0]


def micro_step(engine: Any) -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)
    engine.backward(engine(x).float().square().mean())
    engine.step()


def run_traffic(rank: int, settings: dict[str, Any], accumulation: int) -> dict[str, tuple[int, int]]:
    engine = engine_for(settings, accumulation)
    for _ in range(accumulation):
        micro_step(engine)
    ledger.reset()
    for _ in range(accumulation):
        micro_step(engine)
    return calls_and_bytes()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_gathers_and_one_reduction_per_unit(world: int, accumulation: int) -> None:
    """The last unit of forward is the first of backward: it stays gathered."""
    for seen in run_ranks(run_traffic, world, EVERYTHING_RELEASED, accumulation):
        assert seen == {
            "forward all_gather": (DEPTH * accumulation, BYTES * accumulation),
            "backward all_gather": ((DEPTH - 1) * accumulation, BYTES * (DEPTH - 1) // DEPTH * accumulation),
            "backward reduce_scatter": (DEPTH * accumulation, BYTES * accumulation),
            **CONTROL,
        }


def test_what_stays_gathered_is_not_gathered_again() -> None:
    persistent = {**EVERYTHING_RELEASED, "stage3_param_persistence_threshold": WIDTH}
    settings = [
        {**EVERYTHING_RELEASED, "stage3_max_reuse_distance": 2 * 2 * LAYER_NUMEL},  # two layers, there and back
        persistent,
        {**persistent, "stage3_model_persistence_threshold": 3 * WIDTH},
    ]
    reusing, biases, few = run_each(run_traffic, 2, [(each, 1) for each in settings])
    for seen in reusing:
        assert seen["forward all_gather"][0] == DEPTH
        assert seen["backward all_gather"][0] == DEPTH - 3, "units within the reuse distance"
    for seen in biases:
        assert seen["step all_gather"] == (1, 2 * WIDTH * DEPTH), "one gather of all persistent parameters per step"
        assert seen["forward all_gather"] == (DEPTH, 2 * WIDTH * WIDTH * DEPTH), "and none around their use"
        assert seen["backward reduce_scatter"] == (DEPTH + 1, BYTES)
    for seen in few:
        assert seen["step all_gather"] == (1, 2 * WIDTH * 3), "the model's threshold bounds them"


def run_evaluation(rank: int, settings: dict[str, Any]) -> list[dict[str, tuple[int, int]]]:
    engine = engine_for(settings)
    seen = []
    with torch.no_grad():
        for _ in range(2):
            ledger.reset()
            engine(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))
            seen.append(calls_and_bytes())
    ledger.reset()
    micro_step(engine)
    return [*seen, calls_and_bytes()]


def test_forwards_without_gradients_gather_once_while_it_fits() -> None:
    """Generation gathered the whole model for every token."""
    limited = {**EVERYTHING_RELEASED, "stage3_max_live_parameters": 3 * LAYER_NUMEL}
    [fits, _], [does_not, _] = run_each(run_evaluation, 2, [(EVERYTHING_RELEASED,), (limited,)])
    first, second, training = fits
    assert first == {"forward all_gather": (DEPTH, BYTES)}
    assert second == {}
    assert training["forward all_gather"] == (DEPTH, BYTES), "units kept for inference are released"
    assert does_not[1] == {"forward all_gather": (DEPTH - 3, BYTES * (DEPTH - 3) // DEPTH)}


@dataclass(frozen=True)
class Step:
    """Memory of one training step on one rank, in bytes.

    Attributes:
        resting: held between steps, without communication buffers.
        within: peak allocated above that, without shared memory blocks.
        kept: all shared memory blocks that this rank has created.
    """

    resting: int
    within: int
    kept: int

    @property
    def peak(self) -> int:
        return self.resting + self.within + self.kept


def run_memory(rank: int, num_steps: int) -> list[Step]:
    before = live_bytes(shared_blocks())
    engine = engine_for(EVERYTHING_RELEASED)
    micro_step(engine)  # creates the optimizer's states
    steps = []
    for _ in range(num_steps):
        resting = live_bytes(shared_blocks()) - before
        with profiled_memory() as profiled, without_scratch():
            micro_step(engine)
        steps.append(Step(resting, most_allocated(profiled), kept_bytes()))
    return steps


def without_scratch() -> AbstractContextManager[None]:
    """Avoids oneDNN's copy of a weight, which bf16 products need: it is the processor's memory, not the engine's."""
    return torch.backends.mkldnn.flags(enabled=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_holds_its_shards_and_within_a_step_two_units(world: int) -> None:
    """Between steps: parameters, master and two moments, all divided by the world size (ZeRO paper, section 3), and
    gradients, whose storage is kept in host memory but freed on a device.

    Within a step: two units with parameters and gradients, namely both of the unit in use, and in flight two buckets of
    gradients and two rows of parameters. The test once measured only a forward, without communication buffers."""
    shards, kept = (2 + 2 + 12) * NUM_PARAMETERS / world, 0 if os.environ.get(VARIABLE) == "1" else 2
    units = 2 * (2 + 2) * LAYER_NUMEL
    rows = 2 * 2 * LAYER_NUMEL / world
    activations = (DEPTH + 2) * 2 * ROWS * WIDTH
    # With more than two ranks sums are in fp32, one chunk at a time; in layers as small as these it is the whole shard.
    scratch = 2 * 4 * LAYER_NUMEL / world if world > 2 else 0
    for steps in run_ranks(run_memory, world, 3):
        for step in steps:
            assert step.resting / NUM_PARAMETERS == pytest.approx((2 + kept + 12) / world, rel=0.03)
            assert step.peak <= 1.03 * (shards + units + rows + activations + scratch) + SMALL_BYTES, step


def run_flat(rank: int, num_steps: int) -> list[tuple[int, int]]:
    engine = engine_for(EVERYTHING_RELEASED)
    levels = []
    for step in range(1, num_steps + 1):
        micro_step(engine)
        if step == 1 or step % (num_steps // 4) == 0:
            levels.append((live_bytes(shared_blocks()), kept_bytes()))
    return levels


@pytest.mark.parametrize("num_steps", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_memory_is_flat_over_many_steps(num_steps: int) -> None:
    """Buffers hold no more from the first one on. Before ranks knew that they all do the same, none waited for another:
    they held all gradients."""
    for levels in run_ranks(run_flat, 2, num_steps):
        assert len({live for live, _ in levels[1:]}) == 1
        assert max(kept for _, kept in levels) <= 1.03 * (2 * 2 * LAYER_NUMEL + 2 * LAYER_NUMEL) + SMALL_BYTES
