"""Autos filled from Trainer, Accelerate and the model; contradictions name both sources; a record for each key."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config import (
    AcceleratorView,
    ConfigDict,
    Given,
    ModelView,
    Source,
    TrainingView,
    Views,
    examine,
    load_config,
    resolve,
)
from hf_zero.config.fill import fill, hidden_size, same
from hf_zero.config.hosts import drop_unfilled, write_back
from hf_zero.config.rename import rename
from hf_zero.config.schema.root import HfZero
from tests.config.building import error_of, paths_of, problem_of, put

DS_JSON = """{
    // comments and trailing commas are fine
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": 0.5,
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": 0.1}
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": "auto"},
}
"""
TRAINER = TrainingView(
    per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.5, weight_decay=0.1, bf16=True
)


@pytest.fixture
def ds_json(tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(DS_JSON)
    return path


def test_trainer_fills_and_every_key_says_where_it_came_from(ds_json: Path) -> None:
    resolved = resolve(load_config(ds_json), TRAINER, None, ModelView(config={"hidden_size": 64}), world_size=2)
    assert resolved.batch.train_batch_size == 16
    assert resolved.optimizer is not None
    assert resolved.optimizer.params == {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    sources = {path: str(entry.source) for path, entry in resolved.provenance.items()}
    assert sources["gradient_clipping"] == f"{ds_json}:6"
    assert sources["optimizer.type"] == f"{ds_json}:9"
    assert sources["optimizer.params.weight_decay"] == f"{ds_json}:10"
    assert sources["optimizer.params.lr"] == "TrainingArguments.learning_rate (its default)"
    assert sources["zero_optimization.reduce_bucket_size"] == "model.config.hidden_size = 64"
    assert sources["zero_optimization.allgather_bucket_size"] == "default"
    assert resolved.provenance["zero_optimization.reduce_bucket_size"].value == 4096
    assert resolved.provenance["train_batch_size"].value == 16


def test_contradictions_come_together_with_both_places(ds_json: Path) -> None:
    trainer = TrainingView(
        per_device_train_batch_size=8, max_grad_norm=1.0, weight_decay=0.1, origins={"max_grad_norm": "--max_grad_norm"}
    )
    error = error_of(load_config(ds_json), trainer, world_size=2)
    assert paths_of(error) == ["train_micro_batch_size_per_gpu", "gradient_clipping"]
    message = str(error)
    assert f"train_micro_batch_size_per_gpu = 4  [{ds_json}:4]" in message
    assert (
        "but:  per_device_train_batch_size = 8  [TrainingArguments.per_device_train_batch_size (its default)]"
        in message
    )
    assert f"gradient_clipping = 0.5  [{ds_json}:6]\n    but:  max_grad_norm = 1.0  [--max_grad_norm]" in message
    assert message.count('fix:  write "auto" in the config') == 2


# key, value in the file, fields of TrainingArguments, words in the message
CONFLICTS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("train_micro_batch_size_per_gpu", 3, {"per_device_train_batch_size": 4}, "per_device_train_batch_size = 4"),
    ("gradient_accumulation_steps", 3, {}, "gradient_accumulation_steps = 1"),
    ("train_batch_size", 9, {}, "8 x gradient_accumulation_steps 1 x world size 2 = 16"),
    ("gradient_clipping", 2.0, {}, "max_grad_norm = 1.0"),
    ("optimizer.params.lr", 1e-3, {"learning_rate": 1e-4}, "learning_rate = 0.0001"),
    ("optimizer.params.betas", [0.8, 0.9], {}, "adam_beta1 and adam_beta2 = [0.9, 0.999]"),
    ("optimizer.params.eps", 1e-6, {}, "adam_epsilon = 1e-08"),
    ("optimizer.params.weight_decay", 0.1, {}, "weight_decay = 0.0"),
    ("scheduler.params.warmup_max_lr", 1e-3, {}, "learning_rate = 5e-05"),
    ("scheduler.params.warmup_num_steps", 10, {"warmup_steps": 5}, "warmup_steps = 5"),
    ("scheduler.params.warmup_num_steps", 10, {"warmup_steps": 0.2, "total_steps": 99}, "0.2 x 99 updates = 20"),
    ("scheduler.params.warmup_num_steps", 10, {}, "warmup_steps = 0  [TrainingArguments.warmup_steps (its default)]"),
    ("scheduler.params.total_num_steps", 10, {"total_steps": 99}, "updates of this run = 99"),
    ("fp16.enabled", False, {"fp16": True}, "fp16 = true"),
    ("bf16.enabled", False, {"bf16": True}, "bf16 = true"),
    ("bf16.enabled", True, {}, "bf16 = false"),
    ("bf16.enabled", False, {"bf16_full_eval": True}, "bf16_full_eval = true"),
]


@pytest.mark.parametrize(("path", "value", "fields", "words"), CONFLICTS)
def test_each_key_that_trainer_knows_must_agree(path: str, value: Any, fields: dict[str, Any], words: str) -> None:
    error = error_of(config_with(path, value), TrainingView(**fields), world_size=2)
    assert paths_of(error) == [path]
    assert words in str(error)


def test_an_invalid_value_is_reported_once() -> None:
    """`"gradient_accumulation_steps": "four"` was reported twice: as no number, and as different from Trainer's 1."""
    config = {
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "four",
        "gradient_clipping": "one",
        "bf16": {"enabled": "perhaps"},
    }
    error = error_of(config, TrainingView())
    assert paths_of(error) == ["gradient_accumulation_steps", "gradient_clipping", "bf16.enabled"]
    assert all(problem.rule.startswith("must be") and problem.other is None for problem in error.problems)


def test_no_warm_up_agrees_with_no_warm_up() -> None:
    """Trainer's default of no warm-up fills an "auto" with 1, which contradicted an explicit 0."""
    config = config_with("scheduler.params.warmup_num_steps", 0)
    resolve(config, TrainingView(total_steps=9), world_size=1)
    assert "warmup_steps = 3" in str(error_of(config, TrainingView(total_steps=9, warmup_steps=3)))


def config_with(path: str, value: Any) -> dict[str, Any]:
    """A config with optimizer and scheduler whose other arguments are unset."""
    config: dict[str, Any] = {"train_batch_size": "auto"}
    if path.startswith("optimizer"):
        config["optimizer"] = {"type": "AdamW", "params": {}}
    if path.startswith("scheduler"):
        config["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    return put(config, path, value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("train_micro_batch_size_per_gpu", 8.0),
        ("train_micro_batch_size_per_gpu", "8"),
        ("train_batch_size", 16.0),
        ("gradient_clipping", 1),
        ("gradient_clipping", "1.0"),
        ("optimizer.params.lr", "5e-5"),
        ("optimizer.params.betas", (0.9, 0.999)),
        ("optimizer.params.weight_decay", 0),
        ("bf16.enabled", "false"),
        ("optimizer.params.lr", None),
    ],
)
def test_equal_values_pass_whatever_their_type(path: str, value: Any) -> None:
    config = config_with(path, value)
    assert fill(rename(config, Views(world_size=2, training=TrainingView()))).problems() == ()


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [(8, 8.0, True), ("8", 8, True), (True, 1, False), ("true", True, True), ([1, 2.0], (1.0, "2"), True),
     ([1], [1, 2], False), (float("nan"), float("nan"), False), ("auto", 1, False), ("9" * 5000, 1, False)],
)  # fmt: skip
def test_equality_of_settings(left: Any, right: Any, equal: bool) -> None:
    assert same(left, right) is equal


def test_auto_find_batch_size_may_differ_from_a_fixed_micro_batch() -> None:
    config = {"train_micro_batch_size_per_gpu": 8, "train_batch_size": 16}
    lowered = TrainingView(per_device_train_batch_size=4, batch_size_may_vary=True)
    assert resolve(config, lowered, world_size=2).batch.micro_batch_size == 8


def test_one_writer_per_node_is_set_even_where_the_section_is_missing() -> None:
    config = load_config({"train_batch_size": "auto"})
    write_back(
        config, examine(config, Views(world_size=1, training=TrainingView(save_on_each_node=True)), complete=False)
    )
    assert config["checkpoint"] == {"use_node_local_storage": True}
    assert str(config.source_of("checkpoint.use_node_local_storage")) == "TrainingArguments.save_on_each_node"


def test_what_trainer_filled_it_may_fill_again_and_nobody_else() -> None:
    config = load_config(
        {"train_micro_batch_size_per_gpu": "auto", "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
    )
    write_back(config, examine(config, Views(world_size=1, training=TrainingView(learning_rate=1e-4)), complete=False))
    assert config["train_micro_batch_size_per_gpu"] == 8
    lowered = TrainingView(per_device_train_batch_size=4, batch_size_may_vary=True, learning_rate=1e-4)
    write_back(config, examine(config, Views(world_size=1, training=lowered), complete=False))
    assert config["train_micro_batch_size_per_gpu"] == 4
    by_script = AcceleratorView(prepares=True, batch_sizes=(2,), optimizer={"lr": 1e-3})
    write_back(config, examine(config, Views(world_size=1, accelerator=by_script), complete=False))
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["optimizer"]["params"]["lr"] == 1e-4


ACCELERATE: list[tuple[str, dict[str, Any], Any, str]] = [
    ("train_micro_batch_size_per_gpu", {"batch_sizes": (4, 2)}, 2, "batch_size of the dataloader"),
    ("train_micro_batch_size_per_gpu", {"batch_sizes": (4, 2), "take_largest_batch": True}, 4, "dataloader"),
    ("train_batch_size", {"batch_sizes": (4,), "accumulation_steps": 3}, 24, "micro batch x accumulation steps"),
    ("gradient_accumulation_steps", {"accumulation_steps": 3}, 3, "Accelerator(gradient_accumulation_steps)"),
    ("gradient_clipping", {}, 1.0, "Accelerate's default"),
    ("optimizer.params.lr", {"optimizer": {"lr": 0.01}}, 0.01, "DummyOptim(lr)"),
    ("optimizer.params.betas", {"optimizer": {"betas": [0.8, 0.9]}}, [0.8, 0.9], "DummyOptim(betas)"),
    ("scheduler.params.warmup_max_lr", {"max_lr": 0.02}, 0.02, "learning rate of the optimizer"),
    ("scheduler.params.warmup_min_lr", {"schedule": {"warmup_num_steps": 1}}, 0, "Accelerate's default"),
    ("scheduler.params.total_num_steps", {"schedule": {"total_num_steps": 7}}, 7, "DummyScheduler(total_num_steps)"),
    ("zero_optimization.stage3_gather_16bit_weights_on_model_save", {}, False, "Accelerate's default"),
    (
        "zero_optimization.stage",
        {"launched": {"zero_optimization.stage": Given(value=1, source=Source("environment", "ZERO_STAGE"))}},
        1,
        "ZERO_STAGE",
    ),
]


@pytest.mark.parametrize(("path", "fields", "value", "source"), ACCELERATE)
def test_accelerate_fills(path: str, fields: dict[str, Any], value: Any, source: str) -> None:
    config = config_with(path, "auto")
    views = Views(world_size=2, accelerator=AcceleratorView(prepares=True, **fields))
    given, from_where = fill(rename(config, views)).filled[tuple(path.split("."))]
    assert given == value and source in str(from_where)


def test_accelerate_never_touches_a_fixed_value() -> None:
    config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5, "train_batch_size": "auto"}
    view = AcceleratorView(prepares=True, batch_sizes=(2,), accumulation_steps=7)
    batch = resolve(config, None, view, world_size=2).batch
    assert (batch.micro_batch_size, batch.accumulation_steps, batch.train_batch_size) == (3, 5, 30)


def test_one_section_fills_another_without_any_trainer() -> None:
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_max_lr": "auto"}}
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.03}}, "scheduler": schedule}
    resolved = resolve(config, world_size=1)
    assert resolved.scheduler is not None and resolved.scheduler.params["warmup_max_lr"] == 0.03
    assert str(resolved.provenance["scheduler.params.warmup_max_lr"].source) == "optimizer.params.lr"


@pytest.mark.parametrize("kind", ["FusedAdam", "CPUAdam", "FusedLamb", "AdamW8bit", "OneBitAdam"])
def test_betas_count_for_every_optimizer_that_takes_them(kind: str) -> None:
    """The list of arguments to fill lacked these optimizers: under Trainer their `"auto"` was not filled, and betas
    that contradict TrainingArguments were silently accepted."""
    config = {"train_batch_size": "auto", "optimizer": {"type": kind, "params": {"betas": "auto"}}}
    optimizer = resolve(config, TrainingView(adam_beta2=0.95), world_size=1).optimizer
    assert optimizer is not None and optimizer.params["betas"] == (0.9, 0.95)
    config["optimizer"] = {"type": kind, "params": {"betas": [0.8, 0.9]}}
    assert problem_of(config, TrainingView()).path == "optimizer.params.betas"


def test_an_optimizer_gets_only_arguments_that_it_takes() -> None:
    config = {"train_batch_size": "auto", "optimizer": {"type": "SGD", "params": {"lr": "auto", "betas": "auto"}}}
    resolved = resolve(config, TrainingView(), world_size=1)
    assert resolved.optimizer is not None and resolved.optimizer.params == {"lr": 5e-5, "weight_decay": 0.0}


def test_an_auto_at_an_argument_that_does_not_exist_is_no_argument() -> None:
    schedule = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_max_lr": "auto"}}
    problem = problem_of({"train_batch_size": 2, "scheduler": schedule})
    assert problem.path == "scheduler.params.warmup_max_lr" and "there is no such argument" in problem.rule


SIZES: list[tuple[ModelView | None, int | None, str]] = [
    (ModelView(config={"hidden_size": 64, "d_model": 32}), 64, "model.config.hidden_size"),
    (ModelView(config={"hidden_sizes": [32, 128, 64]}), 128, "model.config.hidden_sizes"),
    (ModelView(config={"text_config": {"hidden_size": 48}, "vision_config": {"hidden_size": 96}}), 48, "text_config"),
    (ModelView(config={"text_config": {"hidden_sizes": [8, 9]}}), 9, "model.config.text_config.hidden_sizes"),
    (ModelView(config={"d_model": 512}), 512, "model.config.d_model"),
    (ModelView(config={"n_embd": 768}), 768, "model.config.n_embd"),
    (ModelView(config={"vision_config": {"hidden_size": 96}}), 96, "model.config.vision_config"),
    (ModelView(config={"encoder": {"d_model": 24}, "decoder": {"d_model": 40}}), 40, "model.config.decoder.d_model"),
    (ModelView(config={"thinker": {"text_config": {"hidden_size": 12}}}), 12, "model.config.thinker.text_config"),
    (ModelView(config={"hidden_size": None}, shapes=((96, 32), (32, 96), (32, 32), (32,))), 32, "shapes"),
    (ModelView(shapes=((1, 8), (1,))), 8, "shapes"),
    (ModelView(shapes=((7,),)), None, ""),
    (ModelView(config={"hidden_size": True, "x": 1}), None, ""),
    (None, None, ""),
]


@pytest.mark.parametrize(("model", "size", "source"), SIZES)
def test_hidden_size_wherever_it_is(model: ModelView | None, size: int | None, source: str) -> None:
    found = hidden_size(model)
    assert (found.value if found else None) == size
    assert source in (str(found.source) if found else "")


def test_the_three_sizes_follow_from_the_hidden_size() -> None:
    keys = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config = {"zero_optimization": dict.fromkeys(keys, "auto")}
    draft = fill(rename(config, Views(world_size=1, model=ModelView(config={"hidden_size": 10}))))
    assert [draft.tree["zero_optimization"][key] for key in keys] == [100, 90, 100]


def test_unfilled_autos_are_taken_out_where_others_would_trip_on_them() -> None:
    config = load_config(
        {"fp16": {"loss_scale": "auto"}, "scheduler": {"params": {"total_num_steps": "auto"}}, "log_level": "auto"}
    )
    drop_unfilled(config, except_below="scheduler.params")
    assert config == {"fp16": {}, "scheduler": {"params": {"total_num_steps": "auto"}}}
    drop_unfilled(config)
    assert config == {"fp16": {}, "scheduler": {"params": {}}}


def test_old_names_keep_their_place_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"train_batch_size": 1,\n"zero_optimization": {"stage": 2,\n"cpu_offload_param": 7}}')
    assert problem_of(load_config(path)).origin == f"{path}:3"


def test_problems_of_a_dict_name_no_place() -> None:
    assert "[" not in str(problem_of({"train_batch_size": 3, "optimiser": 1}))


def test_a_config_with_places_travels() -> None:
    config = load_config('{"bf16": {"enabled": "auto"}}')
    write_back(config, examine(config, Views(world_size=1, training=TrainingView(bf16=True)), complete=False))
    copied = copy.deepcopy(config)
    assert isinstance(copied, ConfigDict) and copied["bf16"] == {"enabled": True}
    assert str(copied.source_of("bf16.enabled")) == "TrainingArguments.bf16"
    copied["bf16"]["enabled"] = False
    assert config["bf16"]["enabled"] is True
    # Unpickling without hf_zero installed gives a plain dict.
    assert b"hf_zero" not in pickle.dumps(config) and type(pickle.loads(pickle.dumps(config))) is dict


def test_own_settings() -> None:
    base: dict[str, Any] = {"train_batch_size": 1, "optimiser": {"a": 1}}
    resolved = resolve({**base, "hf_zero": {"ignore_unknown_keys": True, "decay_biases_and_norms": True}}, world_size=1)
    assert resolved.config.hf_zero.decay_biases_and_norms
    assert any(note.startswith("optimiser: there is no such key; ignored") for note in resolved.notes)
    assert problem_of({**base, "hf_zero": {"ignore_unknown_keys": False}}).path == "optimiser"
    assert not resolve({"train_batch_size": 1}, world_size=1).section(HfZero).decay_biases_and_norms
