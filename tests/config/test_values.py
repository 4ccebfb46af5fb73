"""Supported keys reach their policy; each value of a wrong type is one problem; names are matched or suggested."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from hf_zero.config import AutocastPolicy, ConfigError, LossScalePolicy, Resolved, resolve
from hf_zero.config.schema.checkpoint import Checkpoint, OurCheckpoints
from hf_zero.config.schema.fields import all_paths, section_of, subsection, verdict_of
from hf_zero.config.schema.whole import whole_schema
from hf_zero.config.schema.zero import Zero
from tests.config.building import BASE, error_of, problem_of, with_value


def given(path: str, value: Any) -> Resolved:
    return resolve(with_value(path, value), world_size=1)


def test_supported_keys_reach_their_policy() -> None:
    assert given("zero_optimization.stage", 2.0).zero.stage == 2
    assert given("zero_optimization.reduce_bucket_size", "5e7").zero.bucket_numel == 50_000_000
    assert given("zero_optimization.allgather_bucket_size", 2e8).zero.bucket_numel == 200_000_000
    assert given("zero_optimization.overlap_comm", False).zero.overlap_reduction is False
    assert given("zero_optimization.overlap_comm", None).zero.overlap_reduction is True
    assert given("zero_optimization.ignore_unused_parameters", False).zero.require_all_gradients is True
    assert given("gradient_clipping", 0).gradients.clip_norm == 0.0
    assert given("gradient_clipping", "0.5").gradients.clip_norm == 0.5
    assert given("gradient_allreduce_op", "SUM").gradients.average is False
    assert given("communication_data_type", "FP32").precision.communication == "fp32"
    assert given("data_types.grad_accum_dtype", "fp32").precision.accumulation == "fp32"
    assert given("bf16.enabled", True).precision.model == "bf16"
    assert given("bfloat16.enabled", True).precision.model == "bf16"
    assert given("bf16.check_grad_overflow", False).precision.skip_nonfinite is False
    assert given("bf16.check_grad_overflow", True).precision.loss_scale is None
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 5, "min_loss_scale": 2, "hysteresis": 3}
    scaled = given("fp16", {**fp16, "auto_cast": True, "consecutive_hysteresis": True}).precision
    assert scaled.model == "fp16" and scaled.auto_cast_inputs and scaled.skip_nonfinite
    assert scaled.loss_scale == LossScalePolicy(
        initial=16.0, window=5, minimum=2.0, hysteresis=3, consecutive=True, fixed=None
    )
    fixed = given("fp16", {"enabled": True, "loss_scale": 128}).precision.loss_scale
    assert fixed is not None and fixed.fixed == 128.0
    autocast = given("torch_autocast", {"enabled": True, "dtype": "torch.bfloat16"}).precision
    assert autocast.autocast == AutocastPolicy(dtype="bf16") and autocast.loss_scale is None
    assert given("torch_autocast.enabled", True).precision.autocast == AutocastPolicy(dtype=None)
    amp = given("amp", {"enabled": True, "loss_scale": "dynamic"}).precision
    assert amp.autocast == AutocastPolicy(dtype="fp16") and amp.loss_scale is not None
    assert amp.loss_scale.fixed is None and amp.loss_scale.window == 2000 and amp.model == "fp32"
    assert given("amp", {"enabled": True, "opt_level": "O0"}).precision.autocast is None
    assert given("gradient_predivide_factor", 4).gradients.predivide == 4.0
    assert resolve({**BASE, "prescale_gradients": True}, world_size=2).gradients.predivide == 2.0
    assert given("dataloader_drop_last", True).batch.drop_last is True
    assert given("steps_per_print", 10).config.steps_per_print == 10
    assert given("log_level", "WARNING").config.log_level == "warning"
    assert given("wall_clock_breakdown", True).config.wall_clock_breakdown is True


def test_checkpoint_keys_reach_their_policy() -> None:
    assert given("checkpoint", None).section(Checkpoint) == Checkpoint()
    assert given("checkpoint.tag_validation", "FAIL").section(Checkpoint).tag_validation == "Fail"
    # In the raw dict the string would have counted as false.
    assert given("checkpoint.load_universal", "true").section(Checkpoint).load_universal is True
    assert given("checkpoint.use_node_local_storage", True).section(Checkpoint).use_node_local_storage is True
    assert given("zero_optimization.round_robin_gradients", True).section(Zero).round_robin_gradients is True
    assert getattr(given("hf_zero.checkpoint.async", True).section(OurCheckpoints), "async") is True


def test_defaults() -> None:
    resolved = resolve(BASE, world_size=1)
    assert resolved.zero.stage == 0 and resolved.zero.bucket_numel == 500_000_000 and resolved.zero.overlap_reduction
    assert resolved.gradients.clip_norm == 1.0 and resolved.gradients.average
    assert resolved.precision.model == "fp32" and resolved.precision.skip_nonfinite
    assert resolved.precision.communication is None and resolved.precision.accumulation is None
    assert resolved.optimizer is None and resolved.scheduler is None and resolved.notes == ()


@pytest.mark.parametrize("never", [float("inf"), None])
def test_infinite_steps_per_print_means_never(never: Any) -> None:
    assert given("steps_per_print", never).config.steps_per_print is None


NONSENSE: list[tuple[str, Any, str]] = [
    ("zero_optimization", [2], "must be an object {...}"),
    ("zero_optimization", "2", "must be an object {...}"),
    ("bf16", True, "must be an object {...}"),
    ("optimizer", "AdamW", "must be an object {...}"),
    ("optimizer.params", [1], "must be an object {...}"),
    ("optimizer.type", 3, "must be text"),
    ("zero_optimization.stage", 1.5, "must be a whole number"),
    ("zero_optimization.stage", True, "must be a whole number"),
    ("zero_optimization.stage", None, "must be a whole number"),
    ("zero_optimization.reduce_bucket_size", 0, "must be at least 1"),
    ("zero_optimization.reduce_bucket_size", -5e8, "must be at least 1"),
    ("zero_optimization.reduce_bucket_size", 1e30, "must be a whole number no larger than 9223372036854775807"),
    ("zero_optimization.allgather_bucket_size", float("nan"), "must be a whole number"),
    ("zero_optimization.overlap_comm", "yes please", "must be true or false"),
    ("zero_optimization.overlap_comm", 1, "must be true or false"),
    ("zero_optimization.leaf_module", {"classes": [3]}, "must be text"),
    ("gradient_clipping", -0.1, "must be at least 0"),
    ("gradient_clipping", float("nan"), "must be a finite number"),
    ("gradient_clipping", "1e999", "must be a finite number"),
    ("gradient_clipping", True, "must be a number"),
    ("gradient_clipping", 10**400, "must be a finite number"),
    ("communication_data_type", "float32", 'did you mean "fp32"?'),
    ("communication_data_type", "torch.bfloat16", 'did you mean "bf16"?'),
    ("communication_data_type", 16, 'must be "fp32", "fp16" or "bf16"'),
    ("data_types.grad_accum_dtype", "half", 'did you mean "fp16"?'),
    ("data_types.param_dtype", "bf16", "fp16.enabled and bf16.enabled make the parameters fp32"),
    ("data_types.keep_in_fp32_modules", 7, "must be a list"),
    ("gradient_allreduce_op", "max", "must be 'mean' or 'sum'"),
    ("steps_per_print", 0, "must be at least 1"),
    ("steps_per_print", float("-inf"), "must be a whole number"),
    ("log_level", "loud", "must be 'debug', 'info', 'warning', 'error' or 'critical'"),
    ("checkpoint.tag_validation", "maybe", "must be 'Ignore', 'Warn' or 'Fail'"),
    ("checkpoint.parallel_write.pipeline_stage", "x", "must be true or false"),
    ("fp16.loss_scale", float("inf"), "must be a finite number"),
    ("fp16.hysteresis", -1, "must be at least 0"),
    ("fp16.loss_scale_window", 0, "must be at least 1"),
    ("data_parallel_size", 4, "every rank is data parallel, and there are 1"),
    ("optimizer", {"type": 3}, "must be text"),
    ("tensorboard.enabled", "perhaps", "must be true or false"),
    # It was a warning, and theta kept its default: transposed letters were not recognized as a misspelling.
    ("progressive_layer_drop", {"enabled": True, "tetha": 0.5}, "no such key in progressive_layer_drop"),
    ("progressive_layer_drop", {"enabled": True, "colour": 1}, "no such key in progressive_layer_drop"),
    ("data_efficiency", {"data_routing": {"xyz": 1}}, "no such key in data_efficiency.data_routing"),
    ("aio", {"xyz": 1}, "no such key in aio"),
    ("optimizer", {"type": "AdamW", "xyz": 1}, "no such key in optimizer"),
    ("zero_optimization.sub_group_size", 0, "must be at least 1 below stage 3"),
    ("zero_optimization.sub_group_size", 1.5, "must be a whole number"),
    ("zero_optimization.reduce_bucket_size", 1.5, "must be a whole number"),
    ("zero_optimization.allgather_bucket_size", "2.7", "must be a whole number"),
    ("autotuning", {"enabeld": True}, "no such key in autotuning"),
    ("tensorboard", True, "must be an object"),
    ("timers.throughput.enabled", "?", "must be true or false"),
]


@pytest.mark.parametrize(("path", "value", "rule"), NONSENSE)
def test_nonsense_is_named(path: str, value: Any, rule: str) -> None:
    problem = problem_of(with_value(path, value))
    assert problem.path.startswith(path) and rule in problem.rule and problem.fix


def test_of_a_size_with_a_fraction_the_whole_part_counts() -> None:
    """transformers' inference example uses 0.9 times the square of the hidden size, which is 943718.4 for T0."""
    found = given("zero_optimization", {"stage": 3, "stage3_prefetch_bucket_size": 0.9 * 1024 * 1024})
    assert found.zero.keys.stage3_prefetch_bucket_size == 943718
    problem = problem_of(with_value("zero_optimization.stage3_prefetch_bucket_size", 0.4))
    assert "must be a whole number" in problem.rule


# config, key path of the problem, words of the fix
UNKNOWN: list[tuple[dict[str, Any], str, str]] = [
    ({"gradient_cliping": 1}, "gradient_cliping", 'did you mean "gradient_clipping"?'),
    ({"Train_Batch_Size": 1}, "Train_Batch_Size", "keep only train_batch_size"),
    ({"zero_optimisation": {}}, "zero_optimisation", 'did you mean "zero_optimization"?'),
    ({"zero_optimization": {"stages": 1}}, "zero_optimization.stages", 'did you mean "stage"?'),
    ({"reduce_bucket_size": 1}, "reduce_bucket_size", "did you mean zero_optimization.reduce_bucket_size?"),
    (
        {"offload_optimizer": {"device": "cpu"}},
        "offload_optimizer",
        "mean zero_optimization.offload_optimizer?",
    ),
    ({"bf16": {"loss_scale": 0}}, "bf16.loss_scale", "did you mean fp16.loss_scale?"),
    ({"fp16": {"my_own_note": 1}}, "fp16.my_own_note", "remove it"),
    ({"checkpoint": {"tag_validate": "Warn"}}, "checkpoint.tag_validate", 'did you mean "tag_validation"?'),
    ({"zero_optimization": {"offload_param": {"devise": 1}}}, "zero_optimization.offload_param.devise", '"device"?'),
    ({"zero_optimization.reduce_bukket": 1}, "zero_optimization.reduce_bukket", ""),
    ({"zero_optimization": {"scheduler": {}}}, "zero_optimization.scheduler", "did you mean scheduler?"),
    ({"hf_zero": {"fast": True}}, "hf_zero.fast", "remove it"),
    ({"zero_optimization": {"xyzzy": 1}}, "zero_optimization.xyzzy", "remove it"),
]


@pytest.mark.parametrize(("config", "path", "fix"), UNKNOWN)
def test_an_unknown_key_is_a_problem_where_it_resembles_one_or_deepspeed_checks(
    config: dict[str, Any], path: str, fix: str
) -> None:
    problem = problem_of({**BASE, **config})
    assert problem.path == path and fix in problem.fix
    assert "there is no such key" in problem.rule or path.startswith("hf_zero")


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"batch_size": 8}, "batch_size"),
        (
            {
                "train_batch_size": 8,
                "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_step": 9, "warmup_num_steps": 1}},
            },
            "scheduler.params.total_num_step",
        ),
        ({"train_batch_size": 8, "hf_zero": {"streaming": {"enable": True}}}, "hf_zero.streaming.enable"),
    ],
)
def test_a_key_that_was_meant_is_not_missed(config: dict[str, Any], path: str) -> None:
    """A misspelled key was reported, and so was the absence of the key that it means: `zero_optimisation` with "asks
    for this section", and `batch_size` with "at least one of the two batch sizes must be given"."""
    assert problem_of(config, world_size=2).path == path


def test_a_misspelled_key_beside_the_correct_one_is_not_to_be_renamed() -> None:
    with pytest.raises(ConfigError, match="keep only train_batch_size, which was probably meant and is given, too"):
        resolve({"train_batch_size": 8, "batch_size": 8}, world_size=2)


def test_dotted_literal_keys_have_no_effect_and_are_noted() -> None:
    dotted = {"zero_optimization.reduce_bucket_size": 1234.5, "zero_optimization.stage3_prefetch_bucket_size": 0.9}
    resolved = resolve({**BASE, **dotted}, world_size=1)
    assert resolved.zero.bucket_numel == 500_000_000
    assert [note.split(":")[0] for note in resolved.notes] == list(dotted)


def test_remarks_as_keys_are_noted() -> None:
    resolved = resolve({**BASE, "_comment": "mine", "//": "x", "$schema": "y"}, world_size=1)
    assert [note.split(":")[0] for note in resolved.notes] == ["_comment", "//", "$schema"]


@pytest.mark.parametrize(("legacy", "stage"), [(True, 1), (False, 0)])
def test_boolean_zero_optimization(legacy: bool, stage: int) -> None:
    resolved = resolve({**BASE, "zero_optimization": legacy, "allgather_size": 1000}, world_size=1)
    assert resolved.zero.stage == stage and resolved.zero.bucket_numel == 1000
    assert any("old form" in note for note in resolved.notes)


def test_old_names_are_read_as_the_new_ones() -> None:
    place = given("zero_optimization", {"stage": 2, "cpu_offload": True}).zero.offload_optimizer
    assert place is not None and place.device == "cpu"
    place = given("zero_optimization", {"stage": 3, "cpu_offload_param": True}).zero.offload_param
    assert place is not None and place.device == "cpu"
    ignored = given("zero_optimization", {"stage": 2, "cpu_offload_param": True})
    assert ignored.zero.offload_param is None
    assert [warning.partition(":")[0] for warning in ignored.warnings] == ["zero_optimization.offload_param"]
    resolved = given("zero_optimization", {"stage": 2, "cpu_offload": False, "cpu_offload_use_pin_memory": True})
    assert resolved.zero.stage == 2
    resolved = given("zero_optimization", {"stage": 1, "stage3_gather_fp16_weights_on_model_save": True})
    assert any("16bit" in note for note in resolved.notes)


BOTH: list[tuple[dict[str, Any], str, str]] = [
    (
        {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}},
        "zero_optimization.cpu_offload",
        "keep only offload_optimizer",
    ),
    (
        {
            "zero_optimization": {
                "stage3_gather_fp16_weights_on_model_save": True,
                "stage3_gather_16bit_weights_on_model_save": True,
            }
        },
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        "keep only stage3_gather_16bit",
    ),
    (
        {"zero_optimization": {"stage": 3, "max_live_parameters": 1, "stage3_max_live_parameters": 2}},
        "zero_optimization.max_live_parameters",
        "keep only stage3_max_live_parameters",
    ),
    ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "bfloat16", "keep only bf16"),
    (
        {"aio": {"queue_depth": 4}, "zero_optimization": {"aio": {"queue_depth": 8}}},
        "zero_optimization.aio",
        "keep only",
    ),
    ({"zero_optimization": {}, "allgather_size": 5e8}, "allgather_size", "allgather_bucket_size"),
    (
        {"zero_optimization": {"cpu_offload": "yes"}},
        "zero_optimization.cpu_offload",
        "form is offload_optimizer",
    ),
]


@pytest.mark.parametrize(("config", "path", "fix"), BOTH)
def test_old_and_new_together_is_an_error(config: dict[str, Any], path: str, fix: str) -> None:
    problem = problem_of({**BASE, **config})
    assert problem.path == path and fix in problem.fix


@pytest.mark.parametrize(
    "config",
    [
        {"zero_optimization": {"cpu_offload": "auto"}},
        {"zero_optimization": {"aio": "auto"}},
        {"zero_optimization": {"prefetch_bucket_size": "auto"}},
        {"bfloat16": "auto"},
        {"allgather_size": "auto"},
    ],
)
def test_an_auto_under_another_name_is_reported_as_unfilled(config: dict[str, Any]) -> None:
    """Names are translated before autos are filled: one that a shorthand had was refused as "must be true or false"."""
    resolved = resolve({**BASE, **config}, world_size=1)
    assert any('"auto" was not filled in' in note for note in resolved.notes)


def test_aio_inside_zero_optimization_is_read_as_top_level() -> None:
    resolved = given("zero_optimization", {"stage": 2, "aio": {"block_size": 262144, "thread_count": 1}})
    assert any("read as the top-level section aio" in note for note in resolved.notes)


def test_dicts_that_only_python_can_make() -> None:
    around: dict[str, Any] = {"train_batch_size": 8}
    around["amp"] = {"inner": around}
    assert "nested in itself" in error_of({**BASE, **around}).problems[0].rule
    assert error_of({**BASE, "pipeline": {1: 2}}).problems[0].rule == "keys must be text"


def test_error_survives_pickling() -> None:
    error = error_of({**BASE, "x": 1, "gradient_clipping": -1})
    copy = pickle.loads(pickle.dumps(error))
    assert copy.problems == error.problems and str(copy) == str(error)


def test_every_field_says_what_it_does() -> None:
    for path in all_paths(whole_schema()):
        *parents, name = path.split(".")
        section = section_of(whole_schema(), parents)
        assert section is not None
        field, verdict = section.model_fields[name], verdict_of(section.model_fields[name])
        assert field.description, path
        assert verdict.why or verdict.kind in ("supported", "detail", "check"), path
        assert subsection(field) is None or subsection(field).__doc__, path  # type: ignore[union-attr]
