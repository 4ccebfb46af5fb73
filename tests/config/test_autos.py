"""A literal "auto" that was not filled means "unset" anywhere (test_batch.py has those of batch sizes)."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import resolve
from tests.config.building import BASE, with_value

# path of the unfilled "auto" -> where the default is then visible
STRAYS = [
    ("zero_optimization.stage", lambda r: r.zero.stage == 0),
    ("zero_optimization.reduce_bucket_size", lambda r: r.zero.bucket_numel == 500_000_000),
    ("zero_optimization.allgather_bucket_size", lambda r: r.zero.bucket_numel == 500_000_000),
    ("zero_optimization.overlap_comm", lambda r: r.zero.overlap_reduction),
    ("zero_optimization.ignore_unused_parameters", lambda r: not r.zero.require_all_gradients),
    ("zero_optimization.stage3_prefetch_bucket_size", lambda r: r.zero.stage == 0),
    ("zero_optimization.offload_optimizer.device", lambda r: r.zero.stage == 0),
    ("zero_optimization.offload_param.device", lambda r: r.zero.stage == 0),
    ("zero_optimization.offload_param.nvme_path", lambda r: r.zero.stage == 0),
    ("fp16.enabled", lambda r: r.precision.model == "fp32"),
    ("fp16.loss_scale", lambda r: r.precision.model == "fp32"),
    ("bf16.enabled", lambda r: r.precision.model == "fp32"),
    ("bf16.check_grad_overflow", lambda r: r.precision.skip_nonfinite),
    ("data_types.grad_accum_dtype", lambda r: r.precision.accumulation is None),
    ("communication_data_type", lambda r: r.precision.communication is None),
    ("gradient_clipping", lambda r: r.gradients.clip_norm == 1.0),
    ("steps_per_print", lambda r: r.config.steps_per_print is None),
    ("wall_clock_breakdown", lambda r: not r.config.wall_clock_breakdown),
]


@pytest.mark.parametrize(("path", "is_default"), STRAYS)
def test_unfilled_auto_is_the_default_and_is_noted(path: str, is_default: Any) -> None:
    resolved = resolve(with_value(path, "auto"), world_size=1)
    assert is_default(resolved)
    assert any(note.startswith(f'{path}: "auto"') for note in resolved.notes)


def test_optimizer_and_scheduler_arguments_lose_their_autos() -> None:
    params = {"lr": 1e-3, "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    schedule = {"warmup_min_lr": "auto", "warmup_num_steps": 5, "total_num_steps": "auto"}
    resolved = resolve(
        {
            **BASE,
            "optimizer": {"type": "AdamW", "params": params},
            "scheduler": {"type": "WarmupDecayLR", "params": schedule},
        },
        world_size=1,
    )
    assert resolved.optimizer is not None and resolved.scheduler is not None
    assert resolved.optimizer.params == {"lr": 1e-3}
    assert resolved.scheduler.params == {"warmup_num_steps": 5}


def test_keep_in_fp32_modules_means_auto_literally() -> None:
    resolved = resolve({**BASE, "data_types": {"keep_in_fp32_modules": "auto"}}, world_size=1)
    assert not any('"auto"' in note for note in resolved.notes)


def test_the_raw_dict_is_kept_as_it_is() -> None:
    raw = {**BASE, "zero_optimization": {"stage": "auto"}, "bfloat16": {"enabled": True}}
    before = repr(raw)
    resolved = resolve(raw, world_size=1)
    assert resolved.raw is raw and repr(raw) == before
    assert resolved.precision.model == "bf16"
