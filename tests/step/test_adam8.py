"""AdamW with 8-bit states in the engine: every stage and offload target, checkpoints, and memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import initialize
from hf_zero.checkpoint.deepspeed.universal import convert_to_universal
from hf_zero.checkpoint.opening import open_checkpoint
from hf_zero.kernels.dynamic8 import blocks_of, dequantize
from hf_zero.offload.swap_store import SwappedVector
from hf_zero.optim.adam8 import Adam8Family, AdamW8bit
from tests.checkpoint.test_resume import run_resumed, run_uninterrupted
from tests.checkpoint.training import new_engine, train
from tests.offload.offload_runs import Run, assert_same_bits, engine_for, train_run
from tests.offload.offload_runs import train as train_awkward
from tests.offload.test_offload import CPU, on_drive
from tests.support.ranks import run_each, run_ranks

EIGHT: dict[str, Any] = {"optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-2}}}
WHOLE_BLOCKS = {"sub_group_size": 256}  # sub-groups of other sizes have other blocks
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
FP16: dict[str, Any] = {"fp16": {"enabled": True, "initial_scale_power": 8}}
NARROW_MASTERS = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}


def losses_of(rank: int, world: int, stage: int, sections: dict[str, Any]) -> list[float]:
    engine = new_engine(stage, world, **sections)
    return train(engine, rank, world, range(12))


@pytest.mark.parametrize("world", [1, 2])
def test_every_stage_trains_as_with_32_bits(world: int) -> None:
    kinds: dict[int, list[tuple[int, dict[str, Any]]]] = {
        1: [(0, {}), (3, BF16)],
        2: [(0, BF16), (1, {}), (2, BF16), (3, {}), (2, NARROW_MASTERS)],
    }
    pairs = [(stage, {**eight, **precision}) for stage, precision in kinds[world] for eight in (EIGHT, {})]
    found = [ranks[0] for ranks in run_each(losses_of, world, [(world, *pair) for pair in pairs])]
    for kind, ours, theirs in zip(kinds[world], found[::2], found[1::2], strict=True):
        assert ours == pytest.approx(theirs, rel=0.05) and ours != theirs, kind


@pytest.mark.parametrize(
    ("stage", "bf16"), [(3, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, False), (2, True)))]
)
def test_the_place_of_states_changes_nothing(stage: int, bf16: bool, tmp_path: Path) -> None:
    optimizer = (AdamW8bit, {"lr": 1e-2})
    places: list[dict[str, Any]] = [CPU]
    if stage:
        places.append(on_drive(tmp_path, parameters=stage == 3))
    if stage == 3:
        places.append({"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "ratio": 0.5}})
    runs = [Run(stage, zero={**zero, **WHOLE_BLOCKS}, bf16=bf16, optimizer=optimizer) for zero in places]
    plain = Run(stage, bf16=bf16, optimizer=optimizer)
    expected, *outcomes = run_each(train_run, 2, [(2, run) for run in (plain, *runs)])
    for outcome in outcomes:
        for ours, theirs in zip(outcome, expected, strict=True):
            assert_same_bits(ours, theirs)


@pytest.mark.parametrize(
    ("stage", "world", "sections"),
    [
        pytest.param(0, 2, BF16, id="stage0", marks=pytest.mark.slow),
        pytest.param(1, 2, {}, id="stage1", marks=pytest.mark.slow),
        pytest.param(2, 3, BF16, id="stage2", marks=pytest.mark.slow),
        pytest.param(3, 2, BF16, id="stage3"),
        pytest.param(3, 1, {}, id="alone", marks=pytest.mark.slow),
    ],
)
def test_the_same_world_continues_to_the_bit(stage: int, world: int, sections: dict[str, Any], tmp_path: Path) -> None:
    arguments = (world, world, stage, str(tmp_path), {**EIGHT, **sections})
    expected = run_ranks(run_uninterrupted, *arguments)
    assert run_ranks(run_resumed, *arguments) == expected


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ((2, 2), [(3, 3)]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (((2, 2), [(1, 0)]), ((3, 3), [(2, 1)]))),
    ],
    ids=str,
)
def test_another_world_or_stage_continues_closely(
    source: tuple[int, int], targets: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Blocks are then aligned differently relative to parameters, so that states are rounded once more."""
    (world, stage), root = source, str(tmp_path)
    expected = run_ranks(run_uninterrupted, world, world, stage, root, EIGHT)[0]
    for other_world, other_stage in targets:
        found = run_ranks(run_resumed, other_world, other_world, other_stage, root, EIGHT)[0]
        assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 3)), 2])
def test_adam_and_adam_of_8_bits_continue_each_other(stage: int, tmp_path: Path) -> None:
    """Their states have the same names, and are stored in files as fp32."""
    cases = [(2, stage, str(tmp_path / str(number)), kind) for number, kind in enumerate((EIGHT, {}))]
    expected = run_each(run_uninterrupted, 2, cases)
    swapped = [(*first[:3], second[3]) for first, second in zip(cases, cases[::-1], strict=True)]
    for resumed, losses in zip(run_each(run_resumed, 2, swapped), expected, strict=True):
        assert resumed[0] == pytest.approx(losses[0], rel=0.05)


def offloaded_resume(rank: int, saved: Run, loaded: Run, root: str) -> tuple[Any, Any]:
    first = engine_for(saved, 2)
    train_awkward(first, saved, rank, 2, steps=2)
    first.save_checkpoint(root)
    rest = train_awkward(first, saved, rank, 2, first=2, steps=2)
    second = engine_for(loaded, 2)
    second.load_checkpoint(root)
    return rest, train_awkward(second, loaded, rank, 2, first=2, steps=2)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_checkpoints_of_offloaded_states(stage: int, tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    places: list[dict[str, Any]] = [{}, CPU, on_drive(drive, parameters=False)]
    runs = [Run(stage, zero={**zero, **WHOLE_BLOCKS}, optimizer=(AdamW8bit, {"lr": 1e-2})) for zero in places]
    pairs = [(runs[2], runs[0]), (runs[0], runs[2]), (runs[2], runs[1])]
    cases = [(saved, loaded, str(tmp_path / str(number))) for number, (saved, loaded) in enumerate(pairs)]
    for ranks in run_each(offloaded_resume, 2, cases):
        assert all(rest == resumed for rest, resumed in ranks)


def test_files_hold_fp32(tmp_path: Path) -> None:
    """DeepSpeed's tools read exp_avg and exp_avg_sq like those of its Adam."""
    roots = {stage: tmp_path / str(stage) for stage in (0, 1, 3)}
    run_each(run_uninterrupted, 2, [(2, stage, str(root), EIGHT) for stage, root in roots.items()])
    for root in roots.values():
        view = open_checkpoint(root / "global_step4")
        assert set(view.states()) == {"exp_avg", "exp_avg_sq"} and not view.shard_states and not view.whole_states
        for name, shape in view.shapes.items():
            for kind in view.states():
                values = view.read(name, kind)
                assert values.dtype == torch.float32 and values.numel() == math.prod(shape)
        assert any(bool(view.read(name, "exp_avg_sq").any()) for name in view.shapes)
    convert_to_universal(root / "global_step4", root / "universal")
    folder = root / "universal" / "zero" / "inner.weight"
    assert {file.stem for file in folder.glob("*.pt")} >= {"fp32", "exp_avg", "exp_avg_sq"}


def wide_engine(stage: int, precision: dict[str, Any] = BF16, **zero: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 1000), nn.Tanh(), nn.Linear(1000, 300))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-3, "block_size": 256}},
        **precision,
    }
    engine = initialize(model=model, config=config)[0]
    dtype = next(model.parameters()).dtype
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(2, 300, dtype=dtype)).float().sub(1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    return engine


@pytest.mark.parametrize(("stage", "precision"), [(0, {}), (1, BF16), (2, FP16), (3, NARROW_MASTERS)], ids=str)
def test_bytes_per_parameter(stage: int, precision: dict[str, Any]) -> None:
    engine = wide_engine(stage, precision)
    numel = sum(parameter.numel() for parameter in engine.module.parameters())
    states = engine.gradients.assembly.optimizer.state.values()
    held = sum(value.untyped_storage().nbytes() for state in states for value in state.values())
    assert 2.0 <= held / numel <= 2.1


def test_bytes_on_a_drive(tmp_path: Path) -> None:
    """Codes and scales are transferred, not fp32."""
    engine = wide_engine(2, **{**on_drive(tmp_path, parameters=False), **WHOLE_BLOCKS, "sub_group_size": 1 << 16})
    numel = sum(parameter.numel() for parameter in engine.module.parameters())
    stager = engine.gradients.assembly.optimizer.updater.stager
    vectors = [vector for sub_group in stager.sub_groups for vector in sub_group.stored.vectors.values()]
    assert vectors and all(isinstance(vector, SwappedVector) for vector in vectors)
    assert 2.0 <= sum(vector.num_bytes for vector in vectors) / numel <= 2.1
    for state in engine.gradients.assembly.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            away = state[name].contiguous()
            assert bool(dequantize(away, away.numel() // 260 * 256, signed=name == "exp_avg").isnan().all())


def read_and_set(rank: int, stage: int) -> tuple[float, float]:
    from hf_zero.api import parameter_access

    engine = new_engine(stage, 2, **EIGHT)
    train(engine, rank, 2, range(2))
    weight = engine.module.inner.weight
    seen = parameter_access.safe_get_full_optimizer_state(weight, "exp_avg")
    assert seen is not None and seen.shape == weight_shape(weight) and seen.dtype == torch.float32
    parameter_access.safe_set_full_optimizer_state(weight, seen * 2, "exp_avg")
    again = parameter_access.safe_get_full_optimizer_state(weight, "exp_avg")
    assert again is not None
    return float(seen.norm()), float(again.norm())


def weight_shape(weight: torch.Tensor) -> torch.Size:
    return torch.Size(getattr(weight, "ds_shape", weight.shape))


@pytest.mark.parametrize("stage", [2, 3])
def test_single_states_can_be_read_and_set(stage: int) -> None:
    for before, after in run_ranks(read_and_set, 2, stage):
        assert before > 0 and after == pytest.approx(2 * before, rel=0.02)


def test_an_unused_parameter_keeps_its_weights() -> None:
    """Its elements may share a block with those of a used parameter, which are rounded again."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(10, 10) for name in ("a", "b", "c")})
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, **EIGHT}
    engine = initialize(model=model, config=config)[0]
    for step in range(4):
        names = ("a", "b", "c") if step != 2 else ("a", "c")
        before = {name: model[name].weight.detach().clone() for name in model}
        engine.backward(sum(model[name](torch.ones(10)).square().mean() for name in names))
        engine.step()
        changed = {name for name in model if not torch.equal(before[name], model[name].weight)}
        assert changed == set(names)
    states = engine.gradients.assembly.optimizer.state.values()
    form = Adam8Family().form_of("exp_avg_sq")
    assert form is not None
    for state in states:
        assert bool(blocks_of(state["exp_avg_sq"]).scales.isfinite().all())
