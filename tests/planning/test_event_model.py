"""The event model requests units at the same time as the engine: both are logged, and compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.planning.event_model import Machine, Setup, Shape, Step, default_gathers, simulate
from hf_zero.planning.machine import hardware
from tests.step.test_scale_simulation import messages_of
from tests.support.simulation import META, simulated_world

NUM_UNITS, WIDTH, WORLD = 6, 8, 4
UNIT = WIDTH * (WIDTH + 1)  # elements
# A unit's forward takes 1 s, its backward 2, its gather 1 and its reduction 1.
MACHINE = Machine("round", WORLD, 2.0 * UNIT, 1e9, 2.0 * UNIT * 3 / 4, 1e9, 1e9, 1e9)
SHAPE = Shape("blocks", NUM_UNITS * UNIT, NUM_UNITS)
Log = list[tuple[str, int]]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_UNITS))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return values


def noting(log: Log, gather: Callable[..., Any]) -> Callable[..., Any]:
    def note(unit: int, **details: Any) -> Any:
        log.append(("gather", unit))
        return gather(unit, **details)

    return note


def of_engine(zero: dict[str, Any], own: dict[str, Any], *, negotiates: bool) -> Log:
    """The events of a rank in its fourth update, in order."""
    log: Log = []

    def note_use(block: nn.Module, number: int) -> None:
        block.register_forward_pre_hook(lambda *_: log.append(("forward", number)))
        note_backward = lambda *_: log.append(("backward", number))  # noqa: E731
        block.register_forward_hook(lambda _block, _inputs, output: output.register_hook(note_backward) and None)

    with simulated_world(1, WORLD, negotiates=negotiates) as world:
        with META:
            model = Blocks()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
            **own,
        }
        engine = world.engine(model, config)
        negotiation = engine.module_view.store.coordinator.prefetcher._channel.negotiation
        negotiation.gather = noting(log, negotiation.gather)
        for number, block in enumerate(model.blocks):
            note_use(block, number)
        for _ in range(4):
            log.clear()
            engine.backward(engine(torch.empty(1, WIDTH, device=META)).sum())
            engine.step()
        engine.destroy()
    return log


def of_model(step: Step) -> Log:
    """The same, as pieces of work are requested."""
    found = [piece.what.split() for piece in step.pieces]
    return [(what, int(number)) for what, number in found if what in ("gather", "forward", "backward")]


@pytest.mark.parametrize("live", [0, 2, 3, 5, NUM_UNITS])
@pytest.mark.parametrize("ahead", [0, 1, 2, 3, 20])
def test_units_are_asked_for_when_the_engine_asks_for_them(ahead: int, live: int) -> None:
    """The model assumed incorrectly that one unit is always prefetched, and that none stays gathered for backward."""
    zero = {"stage3_prefetch_bucket_size": ahead * UNIT, "stage3_max_live_parameters": live * UNIT}
    step = simulate(MACHINE, SHAPE, Setup(3, tokens=1, gathers=default_gathers().model_copy(update=zero)))
    assert of_model(step) == of_engine(zero, {}, negotiates=True)


def test_who_follows_no_plan_gathers_one_unit_ahead() -> None:
    zero = {"stage3_prefetch_bucket_size": 3 * UNIT, "stage3_max_live_parameters": NUM_UNITS * UNIT}
    limits = default_gathers().model_copy(update=zero)
    step = simulate(MACHINE, SHAPE, Setup(3, tokens=1, gathers=limits, agreement="memory"))
    assert of_model(step) == of_engine(zero, {}, negotiates=False)


@pytest.mark.parametrize(("agreement", "order"), [("plan", "auto"), ("messages", "negotiated")])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_hosts_tell_each_other_as_much_as_the_engines_do(agreement: Any, order: str, micro_batches: int) -> None:
    layers = 20
    limits = default_gathers().model_copy(update={"stage3_max_reuse_distance": 0})
    setup = Setup(3, tokens=4, micro_batches=micro_batches, gathers=limits, agreement=agreement)
    step = simulate(replace(MACHINE, gpus=16, message=1.0), Shape("blocks", layers * UNIT, layers), setup)
    found = messages_of(world=16, layers=layers, updates=3, order=order, micro_batches=micro_batches)
    assert sum(piece.lane == "messages" for piece in step.pieces) == sum(calls for calls, _ in found.values())


def seconds(message: float, *, host_waits: bool, agreement: Any = "plan", tokens: int = 4) -> float:
    machine = replace(MACHINE, message=message / (WORLD - 1), host_waits=host_waits)
    return simulate(machine, SHAPE, Setup(3, tokens=tokens, agreement=agreement)).seconds


def test_messages_cost_time_where_the_host_waits_for_them_and_elsewhere_only_where_they_take_longest() -> None:
    """The end of backward is agreed on while the last reduction is in flight."""
    plain = seconds(0.0, host_waits=True)
    assert seconds(0.5, host_waits=True) == pytest.approx(plain + 2 * 0.5)
    assert seconds(0.5, host_waits=False) == plain
    assert seconds(2 * plain, host_waits=False) == pytest.approx(3 * 2 * plain)


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_gather_beside_the_next_forward(stage: int) -> None:
    """Of the gathers only the first is waited for, and of the reductions the last: as the engine on a timed network
    (tests/params/test_schedule.py)."""
    setup = Setup(stage, tokens=1, recomputes=False)
    forward, backward, once = NUM_UNITS * 1.0, NUM_UNITS * 2.0, 1.0
    assert simulate(MACHINE, SHAPE, setup).seconds == pytest.approx(once + forward + backward + once, rel=1e-3)


def test_a_gather_that_is_agreed_on_overlaps_nothing() -> None:
    none_stays = default_gathers().model_copy(update={"stage3_max_live_parameters": 0})
    pieces = {
        agreement: simulate(MACHINE, SHAPE, Setup(3, tokens=4, gathers=none_stays, agreement=agreement)).pieces
        for agreement in ("plan", "messages")
    }
    hidden = {
        agreement: Counter(
            each.what.split()[0]
            for gather in of_step
            for each in of_step
            if gather.what.startswith("gather") and each.lane == "compute"
            if gather.start < each.end and each.start < gather.end
        )
        for agreement, of_step in pieces.items()
    }
    beside_update = {"update": NUM_UNITS - 1}  # of all but the first block, with which the next forward starts
    assert hidden == {"plan": {"forward": NUM_UNITS - 1, "backward": NUM_UNITS - 1, **beside_update}, "messages": {}}


def test_what_updates_beside_backward_can_win() -> None:
    """The figures of docs/offload.md: streaming steps that keep no gradient, compared with exact clipping."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "offload.md").read_text(encoding="utf-8")
    machine = hardware({"gpu": "h100", "gpus_per_node": 1, "host_memory": "256G"}).machine()
    won = []
    for tokens in (4096, 16384, 65536):
        setup = Setup(3, offload_optimizer=True, offload_parameters=True, tokens=tokens, streams=True)
        exact, early = (
            simulate(machine, Shape("8b", 8.03e9, 32), replace(setup, clips=clips)).seconds for clips in (True, False)
        )
        won.append(f"{1 - early / exact:.0%}")
    sentence = "{} less time than one with exact clipping at 4,096 tokens, {} less at 16,384 and {} less at 65,536"
    assert sentence.format(*won) in " ".join(page.split())
