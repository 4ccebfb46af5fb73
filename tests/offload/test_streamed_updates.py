"""`hf_zero.offload_update`: offloaded states stream through the device that updates them, or are updated on both."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero.api import run_words
from hf_zero.checkpoint import open_checkpoint
from hf_zero.config import ConfigError, resolve
from hf_zero.device.runtime import HOST_MEMORY
from hf_zero.offload import update_speed
from hf_zero.offload.update_speed import UpdateSpeed
from tests.offload.offload_runs import Run, engine_for, train, waits_for_gradients, weights_of
from tests.support.late import Late, use
from tests.support.ranks import run_each, run_ranks

CPU = {"device": "cpu"}
ZERO = {"offload_optimizer": CPU, "sub_group_size": 64}


def updated_by(where: str, zero: dict[str, Any] = ZERO, **more: Any) -> Run:
    sections = {"hf_zero": {"offload_update": where, **more}}
    return Run(3 if "offload_param" in zero else 2, zero, clip=0.05, sections=sections)


def test_masters_and_states_rest_in_host_memory_and_are_updated_on_the_device(late: Late) -> None:
    engine = engine_for(updated_by("device"), 1)
    train(engine, updated_by("device"), 0, 1, steps=2)
    placements = [bucket.placement for bucket in engine.gradients.assembly.store.buckets]
    assert len(placements) > 2 and all(each.work == late.own for each in placements)
    vectors = [v for sub_group in engine.optimizer.sub_groups for v in sub_group.stored.kept]
    assert len(vectors) == 3 * len(engine.optimizer.sub_groups)
    assert all(v.tensor is None and v.memory == HOST_MEMORY and v.resting is not None for v in vectors)
    assert all(not placement.staging._free for placement in placements), "buffers are only kept during updates"
    engine.destroy()


def test_the_host_waits_for_no_state_of_an_update(late: Late) -> None:
    """Only for gradients, which are on their way to host memory when backward ends."""
    run = updated_by("device")
    engine = engine_for(run, 1)
    train(engine, run, 0, 1, steps=2)
    late.trace = []
    train(engine, run, 0, 1, first=2, steps=1)
    step = late.trace[late.trace.index(("compute", "hf_zero step")) :]
    late.trace = None
    waits = {what for lane, what in step if lane == "host" and "placement.py" in what}
    assert waits <= waits_for_gradients()
    num = len(engine.optimizer.sub_groups)
    step = step[next(place for place, (lane, _) in enumerate(step) if lane == "in") :]  # after the last gradients
    copies = [lane for lane, what in step if lane in ("in", "out") and what.startswith("placement.py")]
    assert (copies.count("in"), copies.count("out")) == (4 * num, 3 * num), "gradient, master, two states; back: three"
    first_out = copies.index("out")
    assert copies[:first_out].count("in") >= 8, "the second sub-group comes during the update of the first"
    engine.destroy()


def run_both(rank: int, device_speed: float) -> tuple[list[float], dict[str, Any], list[bool], str]:
    run = updated_by("both")
    speed = UpdateSpeed(cpu=1.0, device=device_speed * (1 + rank))
    with use(Late()), mock.patch.object(update_speed, "measure", lambda *args, **options: speed):
        engine = engine_for(run, 2)
        numbers, weights = train(engine, run, rank, 2), weights_of(engine)
        streams = [bucket.placement.streams for bucket in engine.gradients.assembly.store.buckets]
        words = next(line for line in run_words._lines(engine) if "offload_update" in line)
        engine.destroy()
    return numbers, weights, streams, words


def run_on_cpu(rank: int) -> tuple[list[float], dict[str, Any]]:
    run = updated_by("cpu")
    with use(Late()):
        engine = engine_for(run, 2)
        return train(engine, run, rank, 2), weights_of(engine)


def test_both_update_a_share_each_and_all_ranks_divide_alike() -> None:
    """Ranks measure different speeds. If they divided buckets differently, they would gather them in different
    orders."""
    both, on_cpu = run_each(run_both, 2, [(1.0,)])[0], run_ranks(run_on_cpu, 2)
    (numbers, weights, streams, words), (_, _, streams_of_other, _) = both
    assert streams == streams_of_other and 0 < sum(streams) < len(streams)
    assert words == f"updates of offloaded states on the device: {(1 / 2 + 2 / 3) / 2:.0%} (hf_zero.offload_update)"
    assert numbers == on_cpu[0][0], "on one kind of processor both have the same arithmetic"
    assert all(torch.equal(weights[name], value) for name, value in on_cpu[0][1].items())


def test_the_measurement_is_of_this_machine(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_speed, "_NUMEL", 1 << 10)
    speed = update_speed.measure(torch.device("cpu"), None, pinned=False)
    assert speed.cpu > 0 and speed.device > 0 and 0 < speed.share_of_device < 1


@pytest.mark.parametrize(("first", "second"), [("device", "cpu"), ("cpu", "device"), ("device", "device")])
def test_checkpoints_are_those_of_any_other_offload(first: str, second: str, late: Late, tmp_path: Path) -> None:
    whole = engine_for(updated_by("cpu"), 1)
    expected = train(whole, updated_by("cpu"), 0, 1, steps=4), weights_of(whole)
    engine = engine_for(updated_by(first), 1)
    numbers = train(engine, updated_by(first), 0, 1, steps=2)
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    engine = engine_for(updated_by(second), 1)
    engine.load_checkpoint(str(tmp_path))
    numbers += train(engine, updated_by(second), 0, 1, first=2, steps=2)
    assert numbers == expected[0]
    assert all(torch.equal(value, expected[1][name]) for name, value in weights_of(engine).items())


def test_a_save_beside_training_holds_the_state_of_its_moment(late: Late, tmp_path: Path) -> None:
    states = []
    for where in ("cpu", "device"):
        run = updated_by(where, checkpoint={"async": True})
        engine = engine_for(run, 1)
        train(engine, run, 0, 1, steps=2)
        engine.save_checkpoint(str(tmp_path / where))
        train(engine, run, 0, 1, first=2, steps=1)
        engine.destroy()
        saved = open_checkpoint(tmp_path / where)
        states.append({(name, kind): saved.read(name, kind) for name in saved.shapes for kind in ("fp32", "exp_avg")})
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_streaming_and_a_missing_offload_are_reported() -> None:
    base = {"train_batch_size": 1, "zero_optimization": {"stage": 3, "offload_param": CPU}}
    own = {"offload_update": "device", "streaming": {"enabled": True}}
    with pytest.raises(ConfigError, match=r"(?s)hf_zero\.offload_update.*streaming updates each unit in host memory"):
        resolve({**base, "hf_zero": own}, world_size=1)
    with pytest.raises(ConfigError, match=r"(?s)hf_zero\.offload_update.*gpu"):
        resolve({**base, "hf_zero": {"offload_update": "gpu"}}, world_size=1)
    resolved = resolve({**base, "hf_zero": {"offload_update": "both"}}, world_size=1)
    assert any("no states are offloaded" in str(remark) for remark in resolved.remarks)
