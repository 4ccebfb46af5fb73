"""ds.json files of other projects: each resolves, and settings without effect are named with the reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hf_zero.config import ModelView, TrainingView, Views, examine, resolve
from tests.config.building import error_of, paths_of
from tests.config.wild import FILES

_ZERO = "zero_optimization."
# file -> key -> words of the reason; all other files give no warnings
WARNED: dict[str, dict[str, str]] = {
    "axolotl/zero1_torch_compile.json": {"compile": "the engine compiles nothing"},
    "axolotl/zero2_torch_compile.json": {"compile": "the engine compiles nothing"},
    "Qwen2-VL-Finetune/zero2_offload.json": {f"{_ZERO}offload_param": "used at stage 3"},
    "LMFlow/ds_config_multimodal.json": {"activation_checkpointing.partition_activations": "different activations"},
    "DeepSpeed-Chat/get_train_ds_config stage 2": {
        f"{_ZERO}offload_param": "used at stage 3",
        f"{_ZERO}memory_efficient_linear": "used at stage 3",
    },
    "DeepSpeed-Chat/get_train_ds_config stage 3": {f"{_ZERO}memory_efficient_linear": "save no copy"},
    "InternVL/zero_stage3_config.json": {f"{_ZERO}reduce_bucket_size": "used at stages 0, 1, 2"},
}


def views_for(config: dict[str, Any]) -> Views:
    """Trainer for a file with unset keys; a user's own loop for a generated dict."""
    training = None
    if "auto" in (config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps")):
        fp16, bf16 = (config.get(name, {}).get("enabled") is True for name in ("fp16", "bf16"))
        training = TrainingView(total_steps=100, fp16=fp16, bf16=bf16)
    return Views(world_size=1, training=training, model=ModelView(config={"hidden_size": 64}))


@pytest.mark.parametrize("name", FILES)
def test_every_file_resolves_and_warns_of_what_it_asks_for_in_vain(name: str) -> None:
    """Nine of fifty files failed that DeepSpeed accepts: offload_param at stage 2, autotp_size 1, field names."""
    config = FILES[name]
    given = copy.deepcopy(config)
    views = views_for(config)
    findings = examine(config, views)
    assert findings.problems == () and config == given
    said = dict(warning.split(": ", 1) for warning in findings.warnings)
    wanted = WARNED.get(name, {})
    assert said.keys() == wanted.keys()
    for key, reason in wanted.items():
        assert reason in said[key]
    resolved = resolve(config, training_args=views.training, model=views.model, world_size=1)
    assert resolved.warnings == findings.warnings
    assert resolved.zero.stage == config["zero_optimization"].get("stage", 0)


FIELD_NAMES = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "module_granularity_threshold",
)  # fmt: skip


def test_a_key_by_the_name_of_its_field() -> None:
    """DeepSpeed reads `max_live_parameters` as well as `stage3_max_live_parameters`; hf_zero did not know the first."""
    fields = {name: number for number, name in enumerate(FIELD_NAMES, 7)}
    flags = dict.fromkeys(("gather_16bit_weights_on_model_save", "use_all_reduce_for_fetch_params"), True)
    zero = {"stage": 3, **fields, **flags, "allgather_sequential": False}
    resolved = resolve({"train_batch_size": 1, "zero_optimization": zero}, world_size=1)
    assert {name: getattr(resolved.zero.keys, f"stage3_{name}") for name in FIELD_NAMES} == fields
    assert resolved.zero.keys.stage3_gather_16bit_weights_on_model_save


def test_an_open_key_by_the_name_of_its_field_is_filled() -> None:
    zero = {"stage": 3, "prefetch_bucket_size": "auto", "param_persistence_threshold": "auto"}
    resolved = resolve(
        {"train_batch_size": 1, "zero_optimization": zero}, model=ModelView(config={"hidden_size": 10}), world_size=1
    )
    keys = resolved.zero.keys
    assert keys.stage3_prefetch_bucket_size == 90 and keys.stage3_param_persistence_threshold == 100


VAIN: dict[str, Any] = {
    "train_batch_size": 1,
    "my_own_note": 1,
    "checkpoint": {"folder": "out"},
    "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "contiguous_gradients": True},
}


def test_strict_makes_errors_of_warnings() -> None:
    assert len(resolve(VAIN, world_size=1).warnings) == 3
    paths = paths_of(error_of({**VAIN, "hf_zero": {"strict": True}}))
    assert set(paths) == {"my_own_note", "checkpoint.folder", "zero_optimization.offload_param"}
