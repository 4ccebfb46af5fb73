"""The event model of a step: lanes overlap as in the engine's schedule, and docs/performance.md has its results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.roofline import BOUNDS, MACHINES, PAGE, SHAPES, device_bytes, fits, over_slowest, page, with_auto_ratio
from hf_zero.planning.event_model import Machine, Setup, Shape, Step, default_gathers, simulate

# Round figures: forward of a unit takes 1 s, its backward 2 s, everything else 1 s where it occurs.
ROUND = Machine(
    "round", 1, flops=2.0, memory=28.0, link=1.0, host_link=2.0, host_memory=28.0, capacity=100.0, queue=0.0
)
TWO_UNITS = Shape("two", 2.0, 2)
PLAIN = Setup(0, tokens=1, recomputes=False)
NONE_STAYS = default_gathers().model_copy(update={"stage3_max_live_parameters": 0})
ALL_ON_HOST = replace(PLAIN, stage=3, offload_optimizer=True, offload_parameters=True, gathers=NONE_STAYS)


def spans(step: Step, lane: str) -> list[tuple[str, float, float]]:
    return [(piece.what, piece.start, piece.end) for piece in step.pieces if piece.lane == lane]


def overlap(step: Step, first: str, second: str) -> float:
    """Seconds in which both lanes are busy."""
    ours, theirs = ([p for p in step.pieces if p.lane == lane] for lane in (first, second))
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in ours for b in theirs)


def test_a_step_without_offload_is_its_compute() -> None:
    step = simulate(ROUND, TWO_UNITS, PLAIN)
    assert spans(step, "compute") == [
        ("forward 0", 0, 1), ("forward 1", 1, 2), ("backward 1", 2, 4), ("backward 0", 4, 6), ("update 1", 6, 7),
        ("update 0", 7, 8),
    ]  # fmt: skip
    assert step.bound == "compute" and over_slowest(step) == 1.0


def test_a_step_with_everything_on_the_host() -> None:
    """Weights are fetched one unit ahead within a pass; gradients leave while the previous unit computes; updates
    follow one another."""
    setup = replace(ALL_ON_HOST, overlaps_step=False)
    step = simulate(ROUND, TWO_UNITS, setup)
    assert spans(step, "in") == [("weights 0", 0, 1), ("weights 1", 1, 2), ("weights 1", 3, 4), ("weights 0", 4, 5)]
    assert spans(step, "compute") == [
        ("forward 0", 1, 2), ("forward 1", 2, 3), ("backward 1", 4, 6), ("backward 0", 6, 8),
    ]  # fmt: skip
    assert spans(step, "out") == [("gradients 1", 6, 7), ("gradients 0", 8, 9)]
    assert spans(step, "host") == [("update 1", 9, 10), ("update 0", 10, 11)], "clipping needs the norm of all"
    early = simulate(ROUND, TWO_UNITS, replace(setup, clips=False))
    assert spans(early, "host") == [("update 1", 7, 8), ("update 0", 9, 10)]


def test_updates_run_beside_the_next_forward() -> None:
    """Each unit is updated before its weights are fetched, while the device computes the unit before it. The step has
    begun with the gradients of the one before."""
    step = simulate(ROUND, TWO_UNITS, ALL_ON_HOST)
    assert spans(step, "host") == [("update 0", 0, 1), ("update 1", 1, 2)]
    assert spans(step, "in") == [("weights 0", 1, 2), ("weights 1", 2, 3), ("weights 1", 4, 5), ("weights 0", 5, 6)]
    assert spans(step, "compute")[:2] == [("forward 0", 2, 3), ("forward 1", 3, 4)]
    assert step.seconds == 10, "and not 11: gradients of unit 0 arrive last"
    queued = simulate(replace(ROUND, queue=0.5), TWO_UNITS, ALL_ON_HOST)
    assert ("update 1", 1.5, 2.5) in spans(queued, "host"), "on an H100's host, the kernels of a unit come in between"
    half = simulate(ROUND, TWO_UNITS, replace(ALL_ON_HOST, offload_ratio=0.5))
    assert spans(half, "host") == [("update 1", 0, 1)], "the first units stay on the device"
    assert spans(half, "update") == [("update 0", 0, 1)], "and are updated there, on a lane of their own"
    assert spans(half, "out")[0] == ("updated weights 0", 1, 2)
    assert spans(half, "in")[0] == ("weights 0", 2, 3)


def test_weights_go_back_while_the_next_are_updated() -> None:
    step = simulate(ROUND, TWO_UNITS, replace(PLAIN, stage=3, offload_optimizer=True))
    assert spans(step, "host") == [("update 1", 7, 8), ("update 0", 8, 9)]
    assert spans(step, "in") == [("updated weights 1", 8, 9), ("updated weights 0", 9, 10)]


def test_everything_overlaps_with_offload() -> None:
    setup = Setup(3, offload_optimizer=True, offload_parameters=True, tokens=4096, clips=False, overlaps_step=False)
    step = simulate(MACHINES[2], SHAPES[1], setup)
    for lane in ("in", "out", "host"):
        assert overlap(step, "compute", lane) > 0.4 * step.busy[lane], lane
    assert all(overlap(step, *lanes) > 0 for lanes in (("in", "out"), ("out", "host"), ("in", "host")))


@pytest.mark.parametrize(("machine", "shape", "setup"), BOUNDS, ids=lambda part: getattr(part, "name", ""))
def test_a_step_is_near_its_slowest_lane(machine: Machine, shape: Shape, setup: Setup) -> None:
    assert over_slowest(simulate(machine, shape, setup)) <= 1.1


def test_every_lane_has_a_case_in_which_it_is_the_slowest() -> None:
    assert {simulate(*case).bound for case in BOUNDS} == {"compute", "collectives", "in", "host"}


def test_bytes_that_stay_on_the_device() -> None:
    """16 bytes per parameter at stage 0; ZeRO's formulas for 8 GPUs above; only two units if all is offloaded."""
    eight, shape = MACHINES[1], Shape("one", 1.0, 1 << 30)
    for stage, expected in ((0, 16.0), (1, 4 + 12 / 8), (2, 2 + 14 / 8), (3, 16 / 8)):
        assert device_bytes(eight, shape, Setup(stage)) == pytest.approx(expected, abs=1e-6)
    assert device_bytes(eight, shape, Setup(3, True, True)) == pytest.approx(0.0, abs=1e-6)
    assert device_bytes(eight, shape, Setup(3, True, True, 0.5)) == pytest.approx(0.5 * 14 / 8, abs=1e-6)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_auto_keeps_the_states_that_fit(machine: Machine, shape: Shape) -> None:
    setup = with_auto_ratio(machine, shape, Setup(3, offload_optimizer=True, offload_parameters=True))
    one_more = replace(setup, offload_ratio=setup.offload_ratio - 1 / shape.units)
    assert fits(machine, shape, setup)
    assert setup.offload_ratio == 0 or not fits(machine, shape, one_more)


def test_the_page_says_what_the_model_says() -> None:
    """`python -m bench.roofline --write` writes it."""
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text
