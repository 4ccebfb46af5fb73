"""Unsupported features are rejected by name, with the reason; keys without effect are accepted and noted."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import ConfigError, resolve
from tests.config import messages
from tests.config.building import BASE, error_of, paths_of, problem_of, with_value

# key, value, words of the message: features, whose page says what to use instead
REFUSED: list[tuple[str, Any, str]] = [
    ("zero_optimization.offload_optimizer.super_offload", True, "its updates may be rolled back"),
    ("aio.use_gds", True, "through host memory"),
    ("zero_optimization.zenflow", {"topk_ratio": 0.1}, "every update is complete"),
    ("zero_optimization.zenflow", {}, "every update is complete"),
    ("zero_optimization.legacy_stage1", True, "there is one stage 1"),
    ("torch_autocast", {"enabled": True, "lower_precision_safe_modules": ["torch.nn.Linear"]}, "not available"),
    ("amp", {"enabled": True, "num_losses": 2}, "there is one loss scale"),
    ("msamp", {"enabled": True, "opt_level": "O1"}, "MS-AMP is retired"),
    ("autotuning", {"enabled": True, "mp_size": 2}, "only data parallelism"),
    ("compile", {"deepcompile": True}, "torch_compile"),
    ("hybrid_engine", {"enabled": True}, "not supported"),
    ("optimizer", {"type": "AdamW", "legacy_fusion": True}, "one step signature"),
]


# key, value, words of the message: values that do not exist, contradictions, and what needs something else
WRONG: list[tuple[str, Any, str]] = [
    ("zero_optimization.stage", 4, "must be 0, 1, 2 or 3"),
    ("zero_optimization.stage", -1, "must be 0, 1, 2 or 3"),
    ("zero_optimization.offload_optimizer.device", "nvme", "at stage 0 every rank would write all states"),
    ("zero_optimization.offload_optimizer.device", "disk", "must be 'none', 'cpu' or 'nvme'"),
    ("zero_optimization", {"stage": 3, "zeropp_loco_param": {"err_beta": 1}}, "the average of errors stays zero"),
    ("zero_optimization.zeropp_loco_param", {"reset_T": 0}, "at least 1"),
    ("hf_zero.quantized_gradient_bits", 2, "must be 4 or 8"),
    ("data_types.buffer_dtype", "int8", 'must be "fp32", "fp16" or "bf16"'),
    ("torch_autocast.dtype", "int8", 'must be "fp32", "fp16" or "bf16"'),
    ("fp16", {"enabled": True, "min_loss_scale": 0}, "a dynamic scale needs a minimum above 0"),
    ("fp16", {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}, "the initial scale, 2 to the power 2"),
    ("fp16", {"enabled": True, "initial_scale_power": 128}, "must fit into fp32 (at most 127)"),
    ("amp", {"enabled": True, "opt_level": "O2"}, "O2 casts the weights themselves to fp16"),
    ("gradient_predivide_factor", 0, "must be more than 0"),
    ("zero_optimization", {"stage": 3, "mics_shard_size": 4}, "the number of ranks, 1, is not a multiple of 4"),
    ("zero_optimization", {"stage": 2, "mics_shard_size": 0}, "must be a number of ranks, or -1 for all"),
    ("sequence_parallel_size", 2, "world size = data ranks x ranks per sequence does not hold: 1 != n x 2"),
    ("hf_zero.shard_group", "node", 'must be a number of ranks, 1 or more, or "host"'),
    ("fp16.fp16_master_weights_and_grads", True, "needs fp16.enabled"),
    ("bf16.bf16_master_weights_and_grads", True, "needs bf16.enabled"),
    ("bf16", {"enabled": True, "bf16_optimizer_states": True}, "needs bf16.bf16_master_weights_and_grads"),
    ("hf_zero.stochastic_rounding", True, "needs bf16.bf16_master_weights_and_grads"),
]


@pytest.mark.parametrize(("path", "value", "words"), WRONG)
def test_a_wrong_value_is_one_problem_with_a_fix(path: str, value: Any, words: str) -> None:
    problem = problem_of(with_value(path, value))
    assert problem.path.startswith(path) and words in problem.rule and problem.fix
    assert not words.startswith("needs ") or problem.fix.startswith("set ")


@pytest.mark.parametrize("other", ["fp16", "bf16", "torch_autocast"])
def test_amp_beside_another_precision_is_refused(other: str) -> None:
    with pytest.raises(ConfigError, match=f"amp.enabled, {other}.enabled"):
        resolve({**BASE, "amp": {"enabled": True}, other: {"enabled": True}}, world_size=1)


@pytest.mark.parametrize(("path", "value", "words"), REFUSED)
def test_a_feature_that_is_not_supported_is_refused_by_name(path: str, value: Any, words: str) -> None:
    problem = problem_of(with_value(path, value))
    assert problem.path.startswith(path) and words in problem.rule and "docs/features.md" in problem.fix


OFF: list[tuple[str, Any]] = [
    ("amp", {"enabled": False, "opt_level": "O1"}),
    ("amp", False),
    ("sparse_gradients", False),
    ("sparse_attention", {}),
    ("sparse_attention", None),
    ("compression_training", {}),
    ("compression_training", {"sparse_pruning": {"shared_parameters": {"enabled": False}, "different_groups": {}}}),
    ("elasticity", {"enabled": False, "max_train_batch_size": 2000}),
    ("curriculum_learning", {"enabled": False}),
    ("data_efficiency", {"enabled": False, "seed": 1, "data_sampling": {"enabled": False, "num_epochs": 3}}),
    ("autotuning", {}),
    ("flops_profiler", {}),
    ("flops_profiler", {"enabled": False, "profile_step": 1, "module_depth": -1, "output_file": None}),
    ("comms_logger", {"enabled": False, "verbose": True}),
    ("tensorboard", {"output_path": "logs"}),
    ("wandb", {"enabled": False, "project": "x"}),
    ("fp16", {"enabled": False, "auto_cast": True, "initial_scale_power": 16}),
    ("fp16", None),
    ("bf16", None),
    ("bfloat16", None),
    ("torch_autocast", {"enabled": False}),
    ("zero_optimization", None),
    ("zero_optimization", {}),
    ("zero_optimization.offload_optimizer", {"device": "none", "nvme_path": None, "pin_memory": True}),
    ("zero_optimization.offload_param", {"device": "none", "nvme_path": "none"}),
    ("zero_optimization.offload_param", {"pin_memory": True}),
    ("zero_optimization.zenflow", None),
    ("zero_optimization.zero_hpz_partition_size", 1),
    ("zero_optimization.zero_quantized_weights", False),
    ("gradient_predivide_factor", 1),
    ("zero_optimization", {"zero_hpz_partition_size": 0}),
    ("tensor_parallel", {"autotp_size": 0}),
    ("tensor_parallel", {"autotp_size": 1}),
    ("sequence_parallel_size", 1),
    ("compile", {"deepcompile": False}),
    ("hf_zero", {}),
    ("optimizer", {}),
    ("scheduler", None),
    ("data_parallel_size", 1),
]


@pytest.mark.parametrize(("path", "value"), OFF)
def test_off_empty_and_null_are_fine(path: str, value: Any) -> None:
    resolved = resolve(with_value(path, value), world_size=1)
    assert resolved.zero.stage == 0 and resolved.precision.model == "fp32" and resolved.optimizer is None


# key, value, stage, words of the note
NOTED: list[tuple[str, Any, int, str]] = [
    ("sparse_gradients", True, 1, "which gives the same result"),
    ("amp", {"enabled": True}, 0, "O1 runs as torch.autocast in fp16"),
    ("zero_optimization.contiguous_gradients", True, 2, "gradients always go to contiguous buckets"),
    ("zero_optimization.contiguous_gradients", False, 1, "gradients always go to contiguous buckets"),
    ("zero_optimization.round_robin_gradients", True, 1, "equal shards"),
    ("zero_optimization.allgather_partitions", True, 1, "always gathered in place"),
    ("zero_optimization.reduce_scatter", True, 2, "reduce-scatter"),
    ("zero_optimization.offload_optimizer", {"device": "cpu", "fast_init": True}, 2, "no effect with device cpu"),
    ("zero_optimization.stage3_max_live_parameters", 1e9, 1, "no effect at stage 1 (used at stage 3)"),
    ("zero_optimization.stage3_gather_16bit_weights_on_model_save", True, 2, "used at stage 3"),
    ("zero_optimization.leaf_module", {"classes": "Block"}, 2, "used at stage 3"),
    ("zero_optimization.elastic_checkpoint", True, 2, "loads at any world size and stage"),
    ("activation_checkpointing.partition_activations", True, 2, "ranks have different activations"),
    ("checkpoint.checkpoint_serialization", False, 2, "files are always in torch's zip format"),
    ("checkpoint.writer", {"type": "FAST"}, 2, "every rank writes its own files"),
    ("aio", {"block_size": 262144, "thread_count": 1}, 2, "nothing is offloaded to NVMe"),
    ("zero_allow_untested_optimizer", True, 2, "any torch optimizer is accepted"),
    ("zero_force_ds_cpu_optimizer", False, 2, "never replaced"),
    ("bf16.immediate_grad_update", True, 2, "from a hook"),
    ("pipeline", {"stages": "auto"}, 0, "pipeline modules are not supported"),
    ("vocabulary_size", 50257, 0, "not a multiple of 8"),
    ("zero_optimization.reduce_bucket_size", 1e6, 0, ""),
    ("zero_optimization.zero_quantized_weights", True, 2, "used at stage 3"),
    ("zero_optimization.zero_quantized_gradients", True, 2, "used at stage 3"),
    ("zero_optimization.zeropp_loco_param", {"err_beta": 0.5}, 3, "gradients are not quantized"),
    ("zero_optimization.offload_param", {"device": "cpu"}, 1, "to offload at other stages, use offload_optimizer"),
    ("zero_optimization.offload_param", {"device": "nvme"}, 0, "no effect at stage 0"),
    ("checkpoint.kind", 1, 0, "there is no such key in checkpoint; ignored"),
    ("xyzzy", 1, 0, "there is no such key at the top level; ignored"),
]


@pytest.mark.parametrize(("path", "value", "stage", "words"), NOTED)
def test_accepted_without_effect_is_noted(path: str, value: Any, stage: int, words: str) -> None:
    config = with_value(path, value)
    config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": stage}
    resolved = resolve(config, world_size=1)
    notes = [note for note in (*resolved.notes, *resolved.warnings) if note.startswith(path)]
    if words:
        assert len(notes) == 1 and words in notes[0]
    else:
        assert not notes


def test_a_key_that_names_its_stage_is_no_warning_at_another() -> None:
    """A correct run at stage 2 logged a warning about a config that also serves stage 3."""
    keys = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 1e6}
    resolved = resolve({**BASE, "zero_optimization": {"stage": 2, **keys}}, world_size=1)
    assert not resolved.warnings
    assert all(any(key in note for note in resolved.notes) for key in keys)


def test_all_problems_come_at_once() -> None:
    """`optimizer.type: AdamWW` was missing from the report of ten other mistakes, but was reported alone."""
    config = {
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 5,
            "overlap_com": True,
            "reduce_bucket_size": "many",
            "offload_param": {"device": "disk"},
            "leaf_module": {"classes": [1, "a", 2]},
        },
        "zero_optimisation": {"stage": 2},
        "fp16": {"enabled": True, "loss_scale": -1},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamWW"},
        "scheduler": {"type": "OneCycle"},
        "gradient_clipping": -1,
        "gradient_acumulation_steps": 1,
        "steps_per_print": 0,
        "autotuning": {"enabled": True, "mp_size": 2},
    }
    error = error_of(config, world_size=2)
    assert set(paths_of(error)) == {
        "zero_optimization.stage",
        "zero_optimization.overlap_com",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.offload_param.device",
        "zero_optimization.leaf_module.classes[0]",
        "zero_optimization.leaf_module.classes[2]",
        "zero_optimisation",
        "fp16.loss_scale",
        "fp16.enabled, bf16.enabled",
        "optimizer.type",
        "scheduler.params.cycle_min_lr",
        "scheduler.params.cycle_max_lr",
        "gradient_clipping",
        "gradient_acumulation_steps",
        "steps_per_print",
        "autotuning.mp_size",
    }
    message = str(error)
    assert "(16 problems)" in message and 'did you mean "AdamW"?' in message
    assert "gradient_clipping = -1\n    rule: it must be at least 0\n    fix:" in message


def test_a_stage_that_does_not_exist_excuses_no_other_key() -> None:
    error = error_of({**BASE, "zero_optimization": {"stage": 7}, "hybrid_engine": {"enabled": True}})
    assert paths_of(error) == ["hybrid_engine", "zero_optimization.stage"]


def test_messages_are_those_that_an_editor_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a change: `python -m tests.config.messages > tests/config/messages.txt`, and proofread the differences."""
    monkeypatch.setenv("COLUMNS", "120")
    assert messages.text() == messages.FILE.read_text(encoding="utf-8")
