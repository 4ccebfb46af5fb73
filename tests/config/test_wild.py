"""ds.json files of other projects: each resolves, and settings without effect are named with the reason."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from hf_zero.config import ConfigError, ModelView, TrainingView, Views, examine, resolve
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


def test_both_names_of_a_key_at_once() -> None:
    zero = {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 2}
    with pytest.raises(ConfigError, match="is the other name of zero_optimization.stage3_max_live_parameters"):
        resolve({"train_batch_size": 1, "zero_optimization": zero}, world_size=1)


VAIN: dict[str, Any] = {
    "train_batch_size": 1,
    "my_own_note": 1,
    "checkpoint": {"folder": "out"},
    "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "contiguous_gradients": True},
}


def test_strict_makes_errors_of_warnings() -> None:
    assert len(resolve(VAIN, world_size=1).warnings) == 3
    with pytest.raises(ConfigError) as caught:
        resolve({**VAIN, "hf_zero": {"strict": True}}, world_size=1)
    paths = {problem.path for problem in caught.value.problems}
    assert paths == {"my_own_note", "checkpoint.folder", "zero_optimization.offload_param"}


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"gradient_acumulation_steps": 2}, "gradient_acumulation_steps"),
        ({"offload_optimizer": {"device": "cpu"}}, "offload_optimizer"),
        ({"checkpoint": {"tag_validate": "Warn"}}, "checkpoint.tag_validate"),
        ({"zero_optimization": {"my_own_note": 1}}, "zero_optimization.my_own_note"),
        ({"fp16": {"my_own_note": 1}}, "fp16.my_own_note"),
    ],
)
def test_what_resembles_a_key_or_stands_where_deepspeed_checks_stays_an_error(
    config: dict[str, Any], path: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"train_batch_size": 1, **config}, world_size=1)
    assert [problem.path for problem in caught.value.problems] == [path]


ELEVEN: dict[str, Any] = {
    "train_batch_size": 7,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": -1,
    "steps_per_print": 0,
    "optimizer": {"type": "AdamWW"},
    "scheduler": {"type": "WarmupLRR"},
    "fp16": {"enabled": "yes", "loss_scale": -1},
    "zero_optimisation": {"stage": 2},
    "zero_optimization": {"stage": 2, "overlap_com": True, "reduce_bucket_size": "many"},
    "autotuning": {"enabled": True, "mp_size": 2},
}


def test_eleven_mistakes_are_eleven_problems() -> None:
    """`optimizer.type: AdamWW` was missing from the report of ten other mistakes, but was reported alone."""
    with pytest.raises(ConfigError) as caught:
        resolve(ELEVEN, world_size=1)
    fixes = {problem.path: problem.fix for problem in caught.value.problems}
    assert len(fixes) == 11
    assert fixes["optimizer.type"] == 'did you mean "AdamW"?' and fixes["scheduler.type"] == 'did you mean "WarmupLR"?'


def test_no_warm_up_steps_mean_no_warm_up() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 0}}
    resolved = resolve({"train_batch_size": 1, "scheduler": scheduler}, world_size=1)
    assert resolved.scheduler is not None and resolved.scheduler.params["warmup_num_steps"] == 0
