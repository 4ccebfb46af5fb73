"""A literal "auto" that was not filled means "unset" anywhere; batch sizes follow from the other two."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import ConfigError, resolve

BASE: dict[str, Any] = {"train_batch_size": 8}

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


def nested(path: str, value: object) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(("path", "is_default"), STRAYS)
def test_unfilled_auto_is_the_default_and_is_noted(path: str, is_default: Any) -> None:
    resolved = resolve({**BASE, **nested(path, "auto")}, world_size=1)
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


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": "auto"}, (8, 4, 1)),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 3}, (6, 3, 1)),
        (
            {"train_batch_size": 8, "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": "auto"},
            (8, 2, 2),
        ),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"},
            (8, 2, 2),
        ),
    ],
)
def test_batch_autos_follow_from_the_others(config: dict[str, Any], expected: tuple[int, int, int]) -> None:
    batch = resolve(config, world_size=2).batch
    assert (batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps) == expected


def test_batch_autos_that_do_not_follow_say_what_to_give() -> None:
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    with pytest.raises(ConfigError) as caught:
        resolve(config, world_size=1)
    message = str(caught.value)
    assert "per_device_train_batch_size" in message and "dataloader" in message
    assert len(caught.value.problems) == 1


def test_the_raw_dict_is_kept_as_it_is() -> None:
    raw = {**BASE, "zero_optimization": {"stage": "auto"}, "bfloat16": {"enabled": True}}
    before = repr(raw)
    resolved = resolve(raw, world_size=1)
    assert resolved.raw is raw and repr(raw) == before
    assert resolved.precision.model == "bf16"
