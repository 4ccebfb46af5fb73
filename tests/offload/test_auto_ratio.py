"""`offload_optimizer.ratio` "auto": what moves to the device after the first update, and that nothing else changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor

from hf_zero.api import run_words
from hf_zero.api.parameter_access import safe_get_full_fp32_param, safe_get_full_optimizer_state
from hf_zero.device.registry import forget_peaks, runtime_of
from hf_zero.device.runtime import HOST, Runtime
from hf_zero.layout.memory import BucketSizes, bytes_near, near_on_all, room_beside
from hf_zero.offload import update_speed
from hf_zero.offload.update_speed import UpdateSpeed
from hf_zero.optim.adam8 import AdamW8bit
from hf_zero.optim.lamb import FusedLamb
from hf_zero.optim.muon import Muon
from hf_zero.optim.stager import moved_to
from hf_zero.profiling import out_of_memory
from tests.offload.offload_runs import ROWS, Run, assert_same_bits, engine_for, train, weights_of
from tests.offload.test_deferred_updates import eventful
from tests.support.arena import ArenaDevice, arena
from tests.support.late import Late, use
from tests.support.models import mlp_batches
from tests.support.ranks import run_each

AUTO = {"device": "cpu", "ratio": "auto"}
CPU = {"device": "cpu"}
PEAK = 1000
Outcome = tuple[list[float], dict[str, torch.Tensor]]


class Sized(Runtime):
    """A device of `total` bytes, of which forward and backward take `PEAK`."""

    total = 1 << 40  # until the engine is there, whose own check is not meant here

    def available(self) -> int:
        return self.total

    def allocated(self) -> tuple[int, int]:
        return 0, PEAK


class SizedArena(Sized, ArenaDevice):
    """Copies are immediate."""


class SizedLate(Sized, Late):
    """Copies are as late as they may be."""


def total_for(room: int) -> int:
    """The smallest device with this room beside the peak."""
    return next(total for total in range(room + PEAK, 2 * (room + PEAK)) if room_beside(total, PEAK) >= room)


def test_the_arithmetic_of_the_choice() -> None:
    """bf16 weights and gradients with Adam: 4 bytes of master, 8 of states, 2 of gradient for each owned element; 5% of
    the device stay free."""
    bucket = BucketSizes(numel=200, owned=100, weight=2, master=4, states=8, summed=2, sent=2)
    assert bytes_near(bucket) == 1400
    assert bytes_near(bucket, in_update=12) == 2600
    assert bytes_near(replace(bucket, states=2.03125)) == 804
    assert room_beside(80_000, 30_000) == 46_000
    assert room_beside(1001, 0) == 950, "rounded down"
    assert near_on_all([(46_000, [30_000, 20_000, 10_000])]) == [True, False, True]
    everyone = [(46_000, [30_000, 10_000, 5_000]), (40_000, [30_000, 11_000, 5_000])]
    assert near_on_all(everyone) == [True, False, True], "the least room, and the largest part of each bucket"
    assert near_on_all([(-1, [10, 0])]) == [False, False]


def engine_with(device: Sized, run: Run, world: int, room: int) -> Any:
    """An engine on `device`, which has this room beside the peak."""
    device.total = Sized.total
    engine = engine_for(run, world)
    device.total = total_for(room)
    return engine


def near(engine: Any) -> list[bool]:
    """For each bucket in the order of the layout, whether it is on the device."""
    placements = engine.gradients.assembly.placements
    return [bucket.placement is placements.near for bucket in engine.gradients.assembly.store.buckets]


def numels(engine: Any) -> list[int]:
    return [bucket.owned.numel for bucket in engine.gradients.assembly.store.buckets]


STAGES = [
    Run(0, {"offload_optimizer": AUTO}),
    Run(1, {"offload_optimizer": AUTO}, bf16=False),
    Run(2, {"offload_optimizer": AUTO}, accumulation=2, clip=0.05),
    Run(3, {"offload_optimizer": AUTO}, clip=0.05),
    Run(3, {"offload_optimizer": AUTO, "offload_param": CPU, "sub_group_size": 64}, bf16=False, accumulation=2),
]


@dataclass(frozen=True)
class Compared:
    """A run with "auto", and the same with a number.

    Attributes:
        near: for each bucket, whether it is on the device.
    """

    ours: Outcome
    expected: Outcome
    numels: list[int]
    near: list[bool]


def compared(rank: int, world: int, run: Run, rooms: list[int]) -> Compared:
    """An evaluation, then training. `rooms`: of each rank, beside the peak."""
    with use(device := SizedArena()):
        engine = engine_with(device, run, world, rooms[rank])
        assert not any(near(engine))
        (batch,) = mlp_batches(1, ROWS)
        dtype = torch.bfloat16 if run.bf16 else torch.float32
        with torch.no_grad():
            engine(**{key: value.to(dtype) for key, value in batch.items()}, flag=False)
        losses = train(engine, run, rank, world, steps=1)
        found = near(engine)
        losses += train(engine, run, rank, world, first=1, steps=run.steps - 1)
        assert near(engine) == found, "chosen once"
        device.total = Sized.total
        fixed = engine_for(replace(run, zero={**run.zero, "offload_optimizer": {**CPU, "ratio": 0.5}}), world)
        expected = train(fixed, run, rank, world), weights_of(fixed)
        return Compared((losses, weights_of(engine)), expected, numels(engine), found)


def check(everyone: Sequence[Compared]) -> None:
    """On this device the updates of both places have the same arithmetic."""
    for each in everyone:
        assert_same_bits(each.ours, each.expected)
        assert each.near == everyone[0].near and any(each.near) and not all(each.near)


def test_what_fits_moves_and_results_stay() -> None:
    """Two ranks with different room. By hand: every element takes 14 bytes in bf16, and 12 in fp32, where masters are
    the weights themselves unless these are in host memory (16)."""
    rooms = [[3000, 5000] if run.stage == 0 else [1500, 2500] for run in STAGES]
    found = run_each(compared, 2, [(2, run, room) for run, room in zip(STAGES, rooms, strict=True)])
    for run, room, everyone in zip(STAGES, rooms, found, strict=True):
        check(everyone)
        per_element = 14 if run.bf16 else 16 if "offload_param" in run.zero else 12
        left, by_hand = min(room), [False] * len(everyone[0].numels)
        for index in reversed(range(len(by_hand))):  # buckets are in the order of backward
            num_bytes = everyone[0].numels[index] * per_element
            if num_bytes <= left:
                by_hand[index], left = True, left - num_bytes
        assert everyone[0].near == by_hand


def saved(rank: int, run: Run, folder: str) -> Outcome:
    with use(SizedArena()):
        engine = engine_for(run, 2)
        train(engine, run, rank, 2, steps=2)
        engine.save_checkpoint(folder)
        return train(engine, run, rank, 2, first=2, steps=2), weights_of(engine)


def resumed(rank: int, run: Run, room: int, folder: str, updates_before: int) -> tuple[Outcome, list[bool]]:
    """Load before the first update, or after `updates_before`, which have chosen."""
    with use(device := SizedArena()):
        engine = engine_with(device, run, 2, room)
        train(engine, run, rank, 2, steps=updates_before)
        engine.load_checkpoint(folder)
        numbers = train(engine, run, rank, 2, first=2, steps=2)
        return (numbers, weights_of(engine)), near(engine)


@pytest.mark.parametrize("run", [pytest.param(STAGES[2], marks=pytest.mark.slow), STAGES[4]], ids=str)
def test_a_run_resumes_before_and_after_the_choice(run: Run, tmp_path: Path) -> None:
    """From a checkpoint of a run with another ratio, and from one of its own."""
    other = {**run.zero, "offload_optimizer": {**CPU, "ratio": 0.4}}
    folders = [str(tmp_path / name) for name in ("fixed", "auto")]
    runs = [(replace(run, zero=other), folders[0]), (run, folders[1])]
    expected, own = run_each(saved, 2, runs)
    cases = [(run, 1500, folder, updates) for folder in folders for updates in (0, 1)]
    for outcomes in ([(outcome, [True, False]) for outcome in own], *run_each(resumed, 2, cases)):
        for (outcome, found), wanted in zip(outcomes, expected, strict=True):
            assert_same_bits(outcome, wanted)
            assert any(found) and not all(found)


SEES_WHOLE = {"hf_zero": {"optimizer_sees": "whole_tensors"}}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "8-bit": (AdamW8bit, {"lr": 1e-2}, {}),
    "LAMB": (FusedLamb, {"lr": 1e-2}, {}),
    "Muon": (Muon, {"lr": 1e-2}, {}),
    "Adafactor": (Adafactor, {"lr": 1e-2, "relative_step": False, "scale_parameter": False, "beta1": 0.9}, {}),
    "client": (torch.optim.RAdam, {"lr": 1e-2}, {}),
    "client of whole tensors": (torch.optim.RAdam, {"lr": 1e-2}, SEES_WHOLE),
}


FEW = ("8-bit", "Adafactor", "client of whole tensors")


@pytest.mark.parametrize(
    "names", [FEW, pytest.param([name for name in OPTIMIZERS if name not in FEW], marks=pytest.mark.slow)]
)
def test_every_optimizer_goes_on_with_its_states(names: Sequence[str]) -> None:
    cases = []
    for (kind, options, sections), stage in itertools.product([OPTIMIZERS[name] for name in names], (0, 2, 3)):
        room = (1500 if kind is AdamW8bit else 3000) * (1 if stage else 2)
        run = Run(stage, {"offload_optimizer": AUTO}, optimizer=(kind, options), sections=sections)
        cases.append((2, run, [room, room]))
    for everyone in run_each(compared, 2, cases):
        check(everyone)


def test_single_values_stay_where_the_host_reads_them() -> None:
    """A count of updates on the device would make every update wait for it."""
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(4), "whole": {2: {"step": 3, "row": torch.ones(2)}}}
    moved = moved_to(SizedArena().own, state)
    assert moved["step"] is state["step"] and moved["whole"][2]["step"] == 3
    for ours, theirs in ((moved, state), (moved["whole"][2], state["whole"][2])):  # type: ignore[index]
        (name,) = {"exp_avg", "row"} & ours.keys()
        assert torch.equal(ours[name], theirs[name]) and ours[name].data_ptr() != theirs[name].data_ptr()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sized]:
    monkeypatch.setattr(update_speed, "measure", lambda *args, **options: UpdateSpeed(cpu=1.0, device=1.0))
    with use(runtime := SizedLate(early=0.0)):
        yield runtime


PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "host": ({"offload_optimizer": AUTO, "sub_group_size": 64}, {}),
    "both in host memory": ({"offload_optimizer": AUTO, "offload_param": CPU, "sub_group_size": 64}, {}),
    "drive": ({"offload_optimizer": {**AUTO, "device": "nvme", "nvme_path": "FOLDER", "buffer_count": 5}}, {}),
    "streams through the device": ({"offload_optimizer": AUTO}, {"hf_zero": {"offload_update": "device"}}),
    "updated by both": ({"offload_optimizer": AUTO, "offload_param": CPU}, {"hf_zero": {"offload_update": "both"}}),
}


@pytest.mark.parametrize("bf16", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["bf16", "fp32"])
@pytest.mark.parametrize("place", PLACES)
def test_from_every_place_without_a_missing_wait(place: str, bf16: bool, device: Sized, tmp_path: Path) -> None:
    """On a device that copies as late as it may, with what programs read between updates. A lone rank sums the norm of
    what leaves for host memory in another order."""
    zero, sections = PLACES[place]
    states = {**zero["offload_optimizer"]} | ({"nvme_path": str(tmp_path)} if place == "drive" else {})

    def run_of(ratio: Any) -> Run:
        placed = {**zero, "offload_optimizer": {**states, "ratio": ratio}}
        return Run(3, placed, bf16=bf16, sections=sections)

    found = []
    for ratio in ("auto", 1.0):
        engine = engine_with(device, run_of(ratio), 1, 2500)
        numbers = train(engine, run_of(ratio), 0, 1, steps=1)
        chosen = near(engine)
        weight = engine.module.inner.weight
        read = [safe_get_full_fp32_param(weight), safe_get_full_optimizer_state(weight, "exp_avg")]
        numbers += train(engine, run_of(ratio), 0, 1, first=1, steps=3)
        found.append((numbers, {**weights_of(engine), "master": read[0], "state": read[1]}))
        assert any(chosen) == (ratio == "auto") and not all(chosen)
        engine.destroy()
        device.synchronize()
    (numbers, ours), (expected, theirs) = found
    assert numbers[::2] == expected[::2], "losses"
    assert numbers[1::2] == pytest.approx(expected[1::2], rel=1e-6), "norms"
    assert_same_bits(([], ours), ([], theirs))


def test_what_comes_between_updates(device: Sized, tmp_path: Path) -> None:
    """Other rates, evaluations, a save, writes into weights and a resume, with everything on the device by then. In
    fp32 with weights in host memory no write into weights reached the masters: until they move, these are the same."""
    found = []
    for ratio in ("auto", 1.0):
        zero = {"offload_optimizer": {**CPU, "ratio": ratio}, "offload_param": CPU, "sub_group_size": 64}
        found.append(eventful(Run(3, zero, bf16=False), tmp_path / str(ratio)))
        device.synchronize()
    (numbers, ours), (expected, theirs) = found
    assert numbers == pytest.approx(expected, rel=1e-6), "a lone rank sums norms in another order"
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_a_real_peak_leaves_what_it_says() -> None:
    """Every byte of the device is counted. With half of the states beside the peak of the first update, no later update
    needs more than the device has."""

    def peak_of(ratio: Any, limit: int) -> tuple[list[float], int, Any]:
        run = Run(2, {"offload_optimizer": {**CPU, "ratio": ratio}})
        with arena(limit) as counted, use(ArenaDevice(counted)):
            engine = engine_for(run, 1)
            numbers = train(engine, run, 0, 1)
            return numbers, counted.peak, engine
        raise AssertionError

    numbers, peak, whole = peak_of(1.0, 1 << 40)
    half = 14 * sum(numels(whole)) // 2
    limit = total_for(half + peak - PEAK)
    found, used, engine = peak_of("auto", limit)
    assert found == numbers
    chosen = engine.gradients.assembly.step.auto_ratio.chosen
    assert 0 < chosen.near < chosen.buckets and chosen.peak <= peak < used <= limit
    assert chosen.num_bytes == 14 * sum(n for n, is_near in zip(numels(engine), near(engine), strict=True) if is_near)
    assert used >= chosen.num_bytes * 12 // 14, "masters and states are there"


def test_a_peak_that_was_reset_counts(device: Sized) -> None:
    """`memory_breakdown` resets the peaks at every phase, so only that of the step was left when "auto" chose."""
    engine = engine_with(device, STAGES[3], 1, 2500)
    runtime = runtime_of(HOST)
    runtime.allocated = lambda: (0, 900 * PEAK)  # type: ignore[method-assign]
    forget_peaks(HOST)
    del runtime.allocated  # type: ignore[method-assign]
    train(engine, STAGES[3], 0, 1, steps=1)
    chosen = engine.gradients.assembly.step.auto_ratio.chosen
    assert chosen.peak == 900 * PEAK and chosen.near == 0
    engine.destroy()


def test_a_skipped_update_decides_nothing(device: Sized) -> None:
    """The first updates in fp16 overflow: they have no states, and have not run the update."""
    run = replace(STAGES[2], accumulation=1, sections={"bf16": {"enabled": True, "check_grad_overflow": True}})
    engine = engine_with(device, run, 1, 2500)
    batch = {key: value.to(torch.bfloat16) for key, value in mlp_batches(1, ROWS)[0].items()}
    engine.backward(engine(**batch, flag=True) * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1 and engine.gradients.assembly.step.auto_ratio.chosen is None
    train(engine, run, 0, 1, steps=1)
    assert any(near(engine))
    engine.destroy()


def test_messages_name_the_ratio(device: Sized) -> None:
    engine = engine_with(device, STAGES[3], 1, 2500)
    (line,) = [line for line in run_words._lines(engine) if "ratio" in line]
    assert "after the first update, as many buckets move to the device as fit" in line
    assert engine.zero_partial_offload() == 1.0
    train(engine, STAGES[3], 0, 1, steps=1)
    ratio = engine.zero_partial_offload()
    away = sum(numel for numel, is_near in zip(numels(engine), near(engine), strict=True) if not is_near)
    assert 0 < ratio < 1 and ratio == pytest.approx(away / sum(numels(engine)))
    (line,) = [line for line in run_words._lines(engine) if "ratio" in line]
    count, buckets = sum(near(engine)), len(near(engine))
    assert f'"auto": {ratio:.3f}. {count} of {buckets} buckets stay on the device' in line
    error = torch.OutOfMemoryError("Tried to allocate 20.00 MiB.")
    out_of_memory.explain(engine, "forward", error)
    assert f'ratio "auto": {ratio:.3f}' in str(error) and f"Set a number above {ratio:.3f} instead" in str(error)
    engine.destroy()


@pytest.mark.at_once
def test_without_device_memory_everything_is_offloaded() -> None:
    """The same ds.json works on a laptop."""
    found = []
    for ratio in ("auto", 1.0):
        run = Run(2, {"offload_optimizer": {**CPU, "ratio": ratio}})
        engine = engine_for(run, 1)
        found.append((train(engine, run, 0, 1), weights_of(engine)))
        assert engine.gradients.assembly.step.auto_ratio is None and not any(near(engine))
        assert engine.zero_partial_offload() == 1.0
    assert_same_bits(*found)
