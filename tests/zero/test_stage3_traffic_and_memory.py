"""What stage 3 promises, measured: gathers and reductions per step, live bytes between steps, peak within a step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.comm import ledger
from hf_zero.entry import initialize
from tests.support.ranks import run_ranks
from tests.zero.test_traffic_and_memory import CONTROL, DEPTH, NUM_PARAMETERS, ROWS, WIDTH, live_bytes

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


def counted() -> dict[str, tuple[int, int]]:
    return {f"{phase} {name}": (tally.calls, tally.num_bytes) for (phase, name), tally in ledger.tallies.items()}


def run_traffic(rank: int, settings: dict[str, Any], accumulation: int) -> dict[str, tuple[int, int]]:
    engine = engine_for(settings, accumulation)
    micro_step(engine)
    for _ in range(accumulation - 1):
        micro_step(engine)
    ledger.reset()
    for _ in range(accumulation):
        micro_step(engine)
    return counted()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_two_gathers_and_one_reduction_per_unit(world: int, accumulation: int) -> None:
    """The last unit of the forward is the first of the backward: it stays, and is gathered once."""
    for seen in run_ranks(run_traffic, world, EVERYTHING_RELEASED, accumulation):
        assert seen == {
            "forward all_gather": (DEPTH * accumulation, BYTES * accumulation),
            "backward all_gather": ((DEPTH - 1) * accumulation, BYTES * (DEPTH - 1) // DEPTH * accumulation),
            "backward reduce_scatter": (DEPTH * accumulation, BYTES * accumulation),
            **CONTROL,
        }


def test_units_within_the_reuse_distance_are_gathered_once() -> None:
    settings = {**EVERYTHING_RELEASED, "stage3_max_reuse_distance": 2 * 2 * LAYER_NUMEL}  # two layers, there and back
    for seen in run_ranks(run_traffic, 2, settings, 1):
        assert seen["forward all_gather"][0] == DEPTH
        assert seen["backward all_gather"][0] == DEPTH - 3


def test_persistent_parameters_are_gathered_after_the_step_only() -> None:
    """Biases stay whole: one gather of all of them per step, and none around their use."""
    settings = {**EVERYTHING_RELEASED, "stage3_param_persistence_threshold": WIDTH}
    for seen in run_ranks(run_traffic, 2, settings, 1):
        assert seen["step all_gather"] == (1, 2 * WIDTH * DEPTH)
        assert seen["forward all_gather"] == (DEPTH, 2 * WIDTH * WIDTH * DEPTH)
        assert seen["backward reduce_scatter"] == (DEPTH + 1, BYTES)


def test_the_model_persistence_threshold_bounds_them() -> None:
    settings = {
        **EVERYTHING_RELEASED,
        "stage3_param_persistence_threshold": WIDTH,
        "stage3_model_persistence_threshold": 3 * WIDTH,
    }
    for seen in run_ranks(run_traffic, 2, settings, 1):
        assert seen["step all_gather"] == (1, 2 * WIDTH * 3)


def run_evaluation(rank: int, settings: dict[str, Any]) -> list[dict[str, tuple[int, int]]]:
    engine = engine_for(settings)
    seen = []
    with torch.no_grad():
        for _ in range(2):
            ledger.reset()
            engine(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))
            seen.append(counted())
    ledger.reset()
    micro_step(engine)
    return [*seen, counted()]


def test_forwards_without_gradients_gather_once_while_it_fits() -> None:
    """Generation used to gather the whole model for every token."""
    first, second, training = run_ranks(run_evaluation, 2, EVERYTHING_RELEASED)[0]
    assert first == {"forward all_gather": (DEPTH, BYTES)}
    assert second == {}
    assert training["forward all_gather"] == (DEPTH, BYTES)  # what inference kept does not outlive it


def test_max_live_parameters_bounds_what_inference_keeps() -> None:
    settings = {**EVERYTHING_RELEASED, "stage3_max_live_parameters": 3 * LAYER_NUMEL}
    _, second, _ = run_ranks(run_evaluation, 2, settings)[0]
    assert second == {"forward all_gather": (DEPTH - 3, BYTES * (DEPTH - 3) // DEPTH)}


def run_memory(rank: int, settings: dict[str, Any]) -> tuple[float, list[int]]:
    """Bytes per parameter between steps, and the bytes above that in the forward of every layer."""
    before = live_bytes()
    engine = engine_for(settings)
    for _ in range(2):
        micro_step(engine)
    buffers = engine_buffers(engine)
    resting = live_bytes(buffers) - before
    above: list[int] = []
    handles = [
        layer.register_forward_hook(lambda *_: above.append(live_bytes(engine_buffers(engine)) - before - resting))
        for layer in engine.module.layers
    ]
    with torch.no_grad():
        engine._store.gatherer._residency = without_keeping(engine)
        engine(torch.randn(ROWS, WIDTH, dtype=torch.bfloat16))
    for handle in handles:
        handle.remove()
    return resting / NUM_PARAMETERS, above


def engine_buffers(engine: Any) -> list[torch.Tensor]:
    gc.collect()
    store, reducer = engine._store, engine._assembly.reducer
    pools = [store.gatherer._buffers._free, store._buffers._free]
    scratch = store._channels.reduce.buffers() + store._channels.gather.buffers()
    return [*reducer._pool, *scratch, *(buffer for pool in pools for free in pool.values() for buffer in free)]


def without_keeping(engine: Any) -> Any:
    residency = engine._store.gatherer._residency
    return type(residency)(frozenset(), frozenset(), residency.needed_in_backward, residency.prefetches)


@pytest.mark.parametrize("world", [2, 4])
def test_between_steps_a_rank_holds_its_shards(world: int) -> None:
    """Parameters, gradients, master and two moments, all divided by the world: ZeRO paper, section 3."""
    for resting, _ in run_ranks(run_memory, world, EVERYTHING_RELEASED):
        assert resting == pytest.approx((2 + 2 + 12) / world, rel=0.03)


def test_while_computing_two_units_are_there() -> None:
    """The one in use, and the one that is being gathered, if not in a buffer that is kept."""
    for _, above in run_ranks(run_memory, 2, EVERYTHING_RELEASED):
        assert max(above) <= 1.05 * 2 * 2 * LAYER_NUMEL


def run_flat(rank: int) -> list[int]:
    engine = engine_for(EVERYTHING_RELEASED)
    levels = []
    for step in range(200):
        micro_step(engine)
        if step % 50 == 49:
            levels.append(live_bytes(engine_buffers(engine)))
    return levels


def test_memory_is_flat_over_two_hundred_steps() -> None:
    for levels in run_ranks(run_flat, 2):
        assert len(set(levels)) == 1
