"""`managed_gradient_accumulation: false`: every step() updates, however many backward passes precede it.

Plain loops with their own `if (i + 1) % n == 0` did not work: the key was refused, and without it step() did nothing
until gradient_accumulation_steps calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_zero
from hf_zero.comm import ledger
from tests.support.beside_plain import ROWS, Layers, batch, config_of
from tests.support.ranks import run_each

WORLD = 2
BACKWARDS = (3, 1, 2)  # before each step
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def plain_loop() -> list[torch.Tensor]:
    model = Layers()
    optimizer, number = adamw(model), 0
    for num_backwards in BACKWARDS:
        for _ in range(num_backwards):
            (model(batch(number)) / num_backwards).backward()
            number += 1
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach() for value in model.state_dict().values()]


def engine_of(zero: dict[str, Any]) -> Any:
    config = config_of(zero["stage"], WORLD, managed_gradient_accumulation=False)
    config["zero_optimization"].update(zero)
    model = Layers()
    return hf_zero.initialize(model=model, optimizer=adamw(model), config=config)[0]


def run_loop(rank: int, zero: dict[str, Any]) -> tuple[list[torch.Tensor], list[int], tuple[int, ...]]:
    """The weights after the last update; reductions of every backward; the engine's counters."""
    engine, number, reductions = engine_of(zero), 0, []
    for num_backwards in BACKWARDS:
        for _ in range(num_backwards):
            ledger.reset()
            loss = engine(batch(number).chunk(WORLD)[rank])
            assert not engine.is_gradient_accumulation_boundary()
            engine.backward(loss / num_backwards)
            reductions.append(sum(ledger.tally("backward", name).calls for name in ("all_reduce", "reduce_scatter")))
            number += 1
        engine.step()
    assert engine.settings.resolved.accumulates, "the start block counts gradients that are kept between backwards"
    with pytest.raises(AssertionError, match="the caller owns the boundary"):
        engine.set_gradient_accumulation_boundary(True)
    weights = [value.clone() for value in engine.module_state_dict().values()]
    return weights, reductions, (engine.global_steps, engine.micro_steps, engine.global_samples)


def test_every_step_updates_as_in_a_plain_loop() -> None:
    expected = plain_loop()
    cases: list[dict[str, Any]] = [{"stage": stage} for stage in range(4)]
    cases += [{"stage": stage, **OFFLOAD} for stage in (1, 2, 3)]
    for zero, ranks in zip(cases, run_each(run_loop, WORLD, [(zero,) for zero in cases]), strict=True):
        for weights, reductions, counters in ranks:
            for value, wanted in zip(weights, expected, strict=True):
                torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6, msg=str(zero))
            assert counters == (len(BACKWARDS), sum(BACKWARDS), sum(BACKWARDS) * ROWS), zero
            # As in DeepSpeed, gradients that every rank keeps whole are only reduced by step().
            assert all(reductions) if zero["stage"] >= 2 else not any(reductions), zero
