"""AdamW with 8-bit states in the engine: training, files and memory.

Other files have it among their cases: tests/checkpoint/test_resume.py, tests/offload/test_offload.py and
test_checkpoints.py.
"""

from __future__ import annotations

import itertools
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
from hf_zero.optim.adam8 import Adam8Family
from tests.checkpoint.test_resume import EIGHT, run_uninterrupted
from tests.checkpoint.training import new_engine, train
from tests.offload.test_offload import on_drive
from tests.support.ranks import run_each

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
    engine = wide_engine(2, **{**on_drive(tmp_path, parameters=False), "sub_group_size": 1 << 16})
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


def test_single_states_can_be_read_and_set() -> None:
    for before, after in itertools.chain(*run_each(read_and_set, 2, [(2,), (3,)])):
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
