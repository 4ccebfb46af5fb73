"""Key names, defaults and batch arithmetic, compared with a real DeepSpeed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config import ConfigError, resolve
from hf_zero.config.schema.fields import section_of
from hf_zero.config.schema.whole import whole_schema

from .deepspeed_answers import ask_deepspeed

NAMES_PROGRAM = """
import enum
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
def plain(value):
    value = value.value if isinstance(value, enum.Enum) else value
    return value if isinstance(value, (bool, int, float, str, type(None))) else "complex"
def fields(model):
    return {field.alias or name: plain(field.default) for name, field in model.model_fields.items()}
answer = {
    "zero_optimization": fields(DeepSpeedZeroConfig),
    "zero_optimization.offload_optimizer": fields(DeepSpeedZeroOffloadOptimizerConfig),
    "zero_optimization.offload_param": fields(DeepSpeedZeroOffloadParamConfig),
    "fp16": fields(DeepSpeedFP16Config),
    "bf16": fields(DeepSpeedBF16Config),
}
"""
# Translated before the schema is applied.
OLD_NAMES = {"cpu_offload", "cpu_offload_param", "stage3_gather_fp16_weights_on_model_save"}
# Intentionally different defaults, see docs/differences.md: unset means yes.
OTHER_DEFAULTS = {
    "zero_optimization.offload_optimizer.pipeline_read",
    "zero_optimization.offload_optimizer.pipeline_write",
}

BATCH_PROGRAM = """
from deepspeed.runtime import config as ds
def triad(config, world_size):
    ds.dist.get_rank = lambda group=None: 0
    ds.dist.get_world_size = lambda group=None: world_size
    try:
        done = ds.DeepSpeedConfig(config)
    except AssertionError:
        return None
    return [done.train_batch_size, done.train_micro_batch_size_per_gpu, done.gradient_accumulation_steps]
answer = [triad(config, world_size) for config, world_size in given]
"""


@pytest.mark.oracle
def test_every_key_of_its_strict_sections_is_known_with_the_same_default(tmp_path: Path) -> None:
    differing = {}
    for path, fields in ask_deepspeed(NAMES_PROGRAM, None, tmp_path).items():
        section = section_of(whole_schema(), path.split("."))
        assert section is not None, path
        for name, default in fields.items():
            if name in OLD_NAMES:
                continue
            assert name in section.model_fields, f"{path}.{name}"
            ours = section.model_fields[name].default
            if default != "complex" and not hasattr(ours, "model_fields") and ours != default:
                differing[f"{path}.{name}"] = (ours, default)
    assert differing.keys() == OTHER_DEFAULTS, differing


@pytest.mark.oracle
def test_same_batch_triad(tmp_path: Path) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    questions: list[tuple[dict[str, Any], int]] = []
    for values in itertools.product((None, 2, 7, 12, 24), (None, 1, 3, 4), (None, 1, 2)):
        config = {key: value for key, value in zip(keys, values) if value is not None}
        questions += [(config, 1), (config, 2), (config, 3)]
    for (config, world_size), expected in zip(
        questions, ask_deepspeed(BATCH_PROGRAM, questions, tmp_path), strict=True
    ):
        try:
            batch = resolve(config, world_size=world_size).batch
            ours = [batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps]
        except ConfigError:
            ours = None  # type: ignore[assignment]
        assert ours == expected, (config, world_size)
