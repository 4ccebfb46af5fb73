"""`hf_zero.overlap_step`: at stage 3 an offloaded update is finished when its weights are read."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from hf_zero.api import run_words
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.api.parameter_access import safe_get_full_fp32_param, safe_get_full_optimizer_state
from hf_zero.config import resolve
from hf_zero.device.runtime import Lane
from hf_zero.offload import update_speed
from hf_zero.offload.update_speed import UpdateSpeed
from tests.offload.offload_runs import ROWS, Run, assert_same_bits, engine_for, train, weights_of
from tests.support.late import Late
from tests.support.models import mlp_batches

T = TypeVar("T")

CPU = {"device": "cpu"}
ZERO = {"offload_optimizer": CPU, "offload_param": CPU, "sub_group_size": 64}
RUN = Run(3, ZERO, clip=0.05)
IN_STEP = {"hf_zero": {"overlap_step": False}}


@pytest.fixture(autouse=True)
def equal_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_speed, "measure", lambda *args, **options: UpdateSpeed(cpu=1.0, device=1.0))


def recorded(engine: Any) -> list[Any]:
    """Buckets in the order of their updates, and the calls around them."""
    seen: list[Any] = []
    updater = engine.optimizer.updater

    def around(owner: Any, name: str, first: str, last: str) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **options: Any) -> Any:
            seen.append(first)
            try:
                return inner(*args, **options)
            finally:
                seen.append(last)

        setattr(owner, name, outer)

    update = updater.update_sub_group
    updater.update_sub_group = lambda sub_group, **more: (seen.append(sub_group.bucket), update(sub_group, **more))
    around(engine, "step", "step", "end of step")
    for unit in engine.module_view.store.units:
        around(unit, "finish", unit, unit)
    return seen


def between(seen: list[Any], first: Any, last: Any) -> list[Any]:
    start = seen.index(first) + 1
    return seen[start : seen.index(last, start)]


def test_each_unit_is_updated_just_before_forward_reads_it(late: Late) -> None:
    """With all states on the host, a step took twice the compute: the device had nothing to do during the update."""
    engine = engine_for(RUN, 1)
    train(engine, RUN, 0, 1, steps=2)
    seen = recorded(engine)
    train(engine, RUN, 0, 1, first=2, steps=2)
    store = engine.module_view.store
    assert between(seen, "step", "end of step") == [], "a step decides, and updates nothing"
    bucket_of = {
        unit: trained.bucket.index
        for unit, trained in itertools.product(store.units, store.buckets)
        if {id(member.parameter) for member in unit.members}.intersection(map(id, trained.parameters))
    }
    forward = seen[seen.index("end of step") + 1 :]
    updated: set[int] = set()
    for what in forward[: forward.index("step")]:
        if isinstance(what, int):
            updated.add(what)
        elif what in bucket_of:
            assert bucket_of[what] in updated, "gathered before its update"
    first_unit = next(what for what in forward if not isinstance(what, int))
    updated_before = {what for what in forward[: forward.index(first_unit)] if isinstance(what, int)}
    assert bucket_of[first_unit] in updated_before and len(updated_before) <= 3 < len(store.buckets), "and prefetched"
    assert any("beside the next forward (hf_zero.overlap_step)" in line for line in run_words._lines(engine))
    engine.destroy()


def test_where_nothing_is_gained_the_step_updates(late: Late) -> None:
    """Below stage 3 a program may read `p.data` at any time."""
    for run in (replace(RUN, stage=2, zero={"offload_optimizer": CPU}), replace(RUN, sections=IN_STEP)):
        engine = engine_for(run, 1)
        train(engine, run, 0, 1, steps=1)
        seen = recorded(engine) if run.stage == 3 else None
        assert not engine.gradients.assembly.step.defers
        if seen is not None:
            train(engine, run, 0, 1, first=1, steps=1)
            updated = [what for what in seen if isinstance(what, int)]
            assert updated and updated == [w for w in between(seen, "step", "end of step") if isinstance(w, int)]
        engine.destroy()


def test_persistent_parameters_are_updated_by_the_step(late: Late) -> None:
    """They stay gathered, and a program may read them without a gather."""
    run = replace(RUN, zero={**ZERO, "stage3_param_persistence_threshold": 20})
    engine = engine_for(run, 1)
    train(engine, run, 0, 1, steps=1)
    seen = recorded(engine)
    train(engine, run, 0, 1, first=1, steps=1)
    persistent = {bucket.bucket.index for bucket in engine.module_view.store.buckets if bucket.is_persistent}
    updated = [what for what in between(seen, "step", "end of step") if isinstance(what, int)]
    assert persistent and set(updated) == persistent
    engine.destroy()


NVME = {"device": "nvme", "nvme_path": "FOLDER", "buffer_count": 5}
PLACES = {
    "all on the host": ZERO,
    "optimizer on the host": {"offload_optimizer": CPU, "sub_group_size": 64},
    "a half on the device": {**ZERO, "offload_optimizer": {**CPU, "ratio": 0.5}},
    "optimizer on a drive": {**ZERO, "offload_optimizer": NVME},
    "all on a drive": {**ZERO, "offload_optimizer": NVME, "offload_param": NVME},
    "updated by both": ZERO,
    "optimizer on the host, updated by both": {"offload_optimizer": CPU, "sub_group_size": 64},
}
FEW = ["a half on the device", "all on a drive", "optimizer on the host, updated by both"]
BY_BOTH = {"offload_update": "both"}  # on one kind of processor both have the same arithmetic


def everything(engine: Any) -> list[Any]:
    """Weights, masters and states as programs read them."""
    named = list(engine.module.named_parameters())
    states = [safe_get_full_optimizer_state(parameter, "exp_avg") for _, parameter in named if parameter.requires_grad]
    masters = [safe_get_full_fp32_param(parameter) for _, parameter in named if parameter.requires_grad]
    return [*weights_of(engine).values(), *masters, *states]


def eventful(run: Run, folder: Path) -> tuple[list[float], list[Any]]:
    """Training with all that may come between a step and the next forward."""
    torch.manual_seed(1234)
    engine = engine_for(run, 1)
    group = engine.optimizer.param_groups[0]
    numbers = train(engine, run, 0, 1, steps=2)
    group["lr"] *= 0.5  # as a schedule does after a step
    engine.optimizer.zero_grad()
    numbers += train(engine, run, 0, 1, first=2, steps=1)
    with torch.no_grad():  # an evaluation that uses a part of the model
        (batch,) = mlp_batches(1, ROWS)
        dtype = torch.bfloat16 if run.bf16 else torch.float32
        numbers.append(engine(**{key: value.to(dtype) for key, value in batch.items()}, flag=False).item())
    numbers += train(engine, run, 0, 1, first=3, steps=1)
    engine.save_checkpoint(str(folder / "saved"))
    numbers += train(engine, run, 0, 1, first=4, steps=1)
    weight = next(engine.module.parameters())
    with GatheredParameters([weight], modifier_rank=0):
        weight.data.mul_(1.5)
    numbers += train(engine, run, 0, 1, first=5, steps=1)
    with pytest.raises(ZeroDivisionError):  # an exception between step and forward
        raise ZeroDivisionError
    numbers += train(engine, run, 0, 1, first=6, steps=1)
    found = everything(engine)
    engine.destroy()
    engine = engine_for(run, 1)
    engine.load_checkpoint(str(folder / "saved"))
    numbers += train(engine, run, 0, 1, first=4, steps=2)
    found += everything(engine)
    engine.destroy()
    return numbers, found


@pytest.mark.parametrize(
    "place", [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in PLACES]
)
@pytest.mark.parametrize("bf16", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["bf16", "fp32"])
@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_bits_as_in_the_step(place: str, bf16: bool, accumulation: int, late: Late, tmp_path: Path) -> None:
    own = BY_BOTH if "both" in place else {}
    run = Run(3, PLACES[place], bf16=bf16, accumulation=accumulation, clip=0.05, sections={"hf_zero": own})
    run = run.in_folder(tmp_path)
    numbers, found = eventful(run, tmp_path / "deferred")
    late.synchronize()
    in_step = replace(run, sections={"hf_zero": {**own, "overlap_step": False}})
    expected_numbers, expected = eventful(in_step, tmp_path / "in step")
    assert numbers == expected_numbers
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


READS: dict[str, Callable[[Any, Path], Any]] = {
    "weights": lambda engine, _: list(weights_of(engine).values()),
    "gathered": lambda engine, _: _gathered(engine),
    "a chunk": lambda engine, _: [_chunk(parameter) for parameter in engine.module.parameters()],
    "masters of parameters": lambda engine, _: [safe_get_full_fp32_param(p) for p in _trained(engine)],
    "states of parameters": lambda engine, _: [
        safe_get_full_optimizer_state(p, "exp_avg_sq") for p in _trained(engine)
    ],
    "masters": lambda engine, _: [p.clone() for g in engine.optimizer.param_groups for p in g["params"]],
    "one master": lambda engine, _: [engine.optimizer.param_groups[0]["params"][0].clone()],
    "copied groups": lambda engine, _: [p for g in copy.deepcopy(engine.optimizer.param_groups) for p in g["params"]],
    "states": lambda engine, _: _states(engine.optimizer.state),
    "state dict": lambda engine, _: _states(engine.optimizer.state_dict()["state"]),
    "state dict of the base optimizer": lambda engine, _: _states(engine.optimizer.optimizer.state_dict()["state"]),
    "16-bit model": lambda engine, folder: _saved(engine, folder),
}
# Those that read what is on the device, or move it.
OF_DEVICE: dict[str, Callable[[Any], Any]] = {
    "flat masters": lambda engine: engine.optimizer.fp32_partitioned_groups_flat,
    "flat weights": lambda engine: engine.optimizer.fp16_partitioned_groups_flat,
    "offloaded masters": lambda engine: engine.offload_states(include=["hp_params"]),
    "offloaded states": lambda engine: engine.offload_states(include=["optim_states"]),
}


def _trained(engine: Any) -> list[Any]:
    return [parameter for parameter in engine.module.parameters() if parameter.requires_grad]


def _gathered(engine: Any) -> list[Any]:
    with GatheredParameters(list(engine.module.parameters())):
        return [parameter.detach().clone() for parameter in engine.module.parameters()]


def _chunk(parameter: Any) -> torch.Tensor:
    from hf_zero.params.store import of

    handle = of(parameter)
    assert handle is not None
    return handle.view().clone()


def _states(states: Any) -> list[torch.Tensor]:
    """In an order that does not depend on which master was updated first."""
    found = (value.clone() for state in states.values() for value in state.values())
    return sorted(found, key=lambda value: (value.numel(), value.reshape(-1).tolist()))


def _saved(engine: Any, folder: Path) -> list[torch.Tensor]:
    engine.save_16bit_model(str(folder), "weights.bin")
    return list(torch.load(folder / "weights.bin").values())


SAVING = {"stage3_gather_16bit_weights_on_model_save": True}


def in_both_ways(body: Callable[[Any, Run], T], zero: dict[str, Any] = ZERO) -> list[T]:
    """Results of `body` with an engine whose updates run beside forward, and with one whose steps run them."""
    found = []
    for sections in ({}, IN_STEP):
        torch.manual_seed(1234)
        run = replace(RUN, zero=zero, sections=sections)
        engine = engine_for(run, 1)
        found.append(body(engine, run))
        engine.destroy()
    return found


@pytest.mark.parametrize("what", READS)
def test_whoever_reads_right_after_a_step_reads_what_it_has_updated(what: str, late: Late, tmp_path: Path) -> None:
    def body(engine: Any, run: Run) -> list[torch.Tensor]:
        train(engine, run, 0, 1, steps=3)
        assert engine.gradients.assembly.placements.deferred.is_pending == (not run.sections)
        read = READS[what](engine, tmp_path / str(not run.sections))
        late.synchronize()
        return list(read)

    deferred, expected = in_both_ways(body, {**ZERO, **SAVING})
    assert deferred and all(torch.equal(ours, theirs) for ours, theirs in zip(deferred, expected, strict=True))


ON_DEVICE = {"offload_param": CPU}  # and so are the updates, of states that stay there


@pytest.mark.parametrize("what", [*READS, *OF_DEVICE])
def test_whoever_reads_right_after_a_step_waits_for_the_update_lane(what: str, late: Late, tmp_path: Path) -> None:
    torch.manual_seed(1234)
    run = replace(RUN, zero={**ON_DEVICE, **SAVING})
    engine = engine_for(run, 1)
    train(engine, run, 0, 1, steps=2)
    assert not late.has_joined(Lane.UPDATE)
    assert any("beside the next forward (hf_zero.overlap_step)" in line for line in run_words._lines(engine))
    if what in READS:
        READS[what](engine, tmp_path)
    else:
        OF_DEVICE[what](engine)
    assert late.has_joined(Lane.UPDATE)
    engine.destroy()


def test_a_step_that_fails_waits_for_what_it_has_queued_on_the_update_lane(late: Late) -> None:
    """A program may catch the error, and save the masters that were updated."""
    run = replace(RUN, zero=ON_DEVICE)
    engine = engine_for(run, 1)
    train(engine, run, 0, 1, steps=2)
    updater = engine.optimizer.updater
    update, calls = updater.update_sub_group, itertools.count()

    def fails_later(sub_group: Any, **options: Any) -> None:
        if next(calls) == 2:
            raise MemoryError("no room for the update")
        update(sub_group, **options)

    updater.update_sub_group = fails_later
    with pytest.raises(MemoryError, match="no room for the update"):
        train(engine, run, 0, 1, first=2, steps=1)
    assert late.has_joined(Lane.UPDATE)
    engine.destroy()


def test_what_the_update_lane_writes_outlives_its_engine(late: Late) -> None:
    """Otherwise the compute stream would get memory that an update still writes to."""
    run = replace(RUN, zero=ON_DEVICE)
    engine = engine_for(run, 1)
    train(engine, run, 0, 1, steps=2)
    masters = [sub_group.master for sub_group in engine.optimizer.sub_groups]
    moments = [state["exp_avg"] for state in engine.optimizer.optimizer.state.values()]
    written = {tensor.untyped_storage().data_ptr() for tensor in (*masters, *moments)}
    assert not late.has_joined(Lane.UPDATE)
    del masters, moments
    engine = weakref.ref(engine)
    gc.collect()
    assert engine() is None
    assert written <= late.kept_addresses()
    late.synchronize()


def test_a_program_clips_masters_between_steps(late: Late) -> None:
    """It must clip what the step has updated, and not what the next forward will."""

    def body(engine: Any, run: Run) -> Any:
        numbers = train(engine, run, 0, 1, steps=2)
        with torch.no_grad():
            for group in engine.optimizer.param_groups:
                for master in group["params"]:
                    master.clamp_(-0.05, 0.05)
        return numbers + train(engine, run, 0, 1, first=2, steps=2), weights_of(engine)

    assert_same_bits(*in_both_ways(body))


def test_a_plain_backward_of_units_that_forward_has_not_used(late: Late) -> None:
    """Their gradients, zeros, take the place of those that their update still needs."""

    def body(engine: Any, run: Run) -> Any:
        train(engine, run, 0, 1, steps=2)
        layer = next(m for m in engine.module.modules() if isinstance(m, torch.nn.Linear))
        inputs = torch.ones(3, layer.in_features, dtype=torch.bfloat16)
        layer(inputs).float().square().mean().backward()
        engine.step()
        return [], weights_of(engine)

    assert_same_bits(*in_both_ways(body))


def test_an_error_of_a_deferred_update_is_raised_by_the_forward_that_needs_it(late: Late) -> None:
    engine = engine_for(RUN, 1)
    train(engine, RUN, 0, 1, steps=2)

    def fails(sub_group: Any, **_: Any) -> None:
        raise MemoryError("no room for the update")

    engine.optimizer.updater.update_sub_group = fails
    with pytest.raises(MemoryError, match="no room for the update"):
        train(engine, RUN, 0, 1, first=2, steps=1)
    engine.destroy()


@pytest.mark.parametrize(("stage", "words"), [(2, "no effect at stage 2"), (3, "no states are offloaded")])
def test_where_the_setting_has_no_effect_it_says_so_once(stage: int, words: str) -> None:
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, **IN_STEP}
    said = [text for remark in resolve(config, world_size=1).remarks if "overlap_step" in (text := str(remark))]
    assert len(said) == 1 and words in said[0]


def test_with_weights_on_the_host_the_setting_has_an_effect() -> None:
    """The device's own update of its states runs beside the next forward then."""
    zero = {"stage": 3, **ON_DEVICE}
    config = {"train_batch_size": 1, "zero_optimization": zero, **IN_STEP}
    assert not [remark for remark in resolve(config, world_size=1).remarks if "overlap_step" in str(remark)]
