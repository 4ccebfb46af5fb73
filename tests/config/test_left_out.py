"""TrainingArguments apply even if the config lacks their key.

With `max_grad_norm=100` in TrainingArguments and no `gradient_clipping` in ds.json, gradients were silently clipped at
1.0, because an absent key had DeepSpeed's default and only "auto" followed TrainingArguments. The same happened to the
learning rate of an optimizer section without params (0.001), the warm-up of a schedule without params (1000 updates),
and an `fp16` section without `enabled` (off).
"""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import AcceleratorView, Resolved, TrainingView, Views, examine, load_config, resolve
from hf_zero.config.hosts import write_back
from tests.config.building import put

TOTAL = 60
ADAMW: dict[str, Any] = {"optimizer": {"type": "AdamW"}}
DECAY: dict[str, Any] = {"scheduler": {"type": "WarmupDecayLR"}}

# key, required rest of the file, TrainingArguments, the resulting value (test_fill.py has the contradicting ones)
FIELDS: list[tuple[str, dict[str, Any], dict[str, Any], Any]] = [
    ("gradient_clipping", {}, {"max_grad_norm": 100.0}, 100.0),
    ("gradient_clipping", {}, {"max_grad_norm": 0.0}, 0.0),
    ("gradient_accumulation_steps", {}, {"gradient_accumulation_steps": 4}, 4),
    ("train_micro_batch_size_per_gpu", {}, {"per_device_train_batch_size": 3}, 3),
    ("fp16.enabled", {}, {"fp16": True}, True),
    ("bf16.enabled", {}, {"bf16": True}, True),
    ("optimizer.params.lr", ADAMW, {"learning_rate": 3e-4}, 3e-4),
    ("optimizer.params.lr", ADAMW, {}, 5e-5),
    ("optimizer.params.betas", ADAMW, {"adam_beta1": 0.8, "adam_beta2": 0.95}, (0.8, 0.95)),
    ("optimizer.params.eps", ADAMW, {"adam_epsilon": 1e-6}, 1e-6),
    ("optimizer.params.weight_decay", ADAMW, {"weight_decay": 0.1}, 0.1),
    ("scheduler.params.warmup_max_lr", DECAY, {"learning_rate": 3e-4}, 3e-4),
    ("scheduler.params.warmup_num_steps", DECAY, {"warmup_steps": 7}, 7),
    ("scheduler.params.warmup_num_steps", DECAY, {"warmup_steps": 0.1}, 6),
    ("scheduler.params.total_num_steps", DECAY, {}, TOTAL),
]
IDS = [f"{path}-{given}" for path, _, given, _ in FIELDS]


def absent(path: str, rest: dict[str, Any]) -> list[dict[str, Any]]:
    """All ways to omit the key: without its section, in an empty or null one, as null."""
    ways = [rest, put(dict(rest), path, None)]
    parent = path.rpartition(".")[0]
    if parent:
        ways += [put(dict(rest), parent, {}), put(dict(rest), parent, None)]
    return ways


def value_of(path: str, resolved: Resolved) -> Any:
    """The value that the engine will use, which may differ from the config's."""
    section, _, name = path.rpartition(".")
    if section == "optimizer.params":
        assert resolved.optimizer is not None
        return resolved.optimizer.params[name]
    if section == "scheduler.params":
        assert resolved.scheduler is not None
        return resolved.scheduler.params[name]
    return {
        "gradient_clipping": resolved.gradients.clip_norm,
        "gradient_accumulation_steps": resolved.batch.accumulation_steps,
        "train_micro_batch_size_per_gpu": resolved.batch.micro_batch_size,
        "fp16.enabled": resolved.precision.model == "fp16",
        "bf16.enabled": resolved.precision.model == "bf16",
    }[path]


def view(given: dict[str, Any]) -> TrainingView:
    return TrainingView(total_steps=TOTAL, **given)


@pytest.mark.parametrize(("path", "rest", "given", "expected"), FIELDS, ids=IDS)
def test_absent_is_auto(path: str, rest: dict[str, Any], given: dict[str, Any], expected: Any) -> None:
    follows = [*absent(path, rest), put(dict(rest), path, "auto")]
    agrees = put(dict(rest), path, list(expected) if isinstance(expected, tuple) else expected)
    for config in (*follows, agrees):
        assert value_of(path, resolve(load_config(config), view(given), world_size=2)) == expected, config
    for config in follows:
        source = resolve(load_config(config), view(given), world_size=2).provenance[path].source
        assert source.kind == "training", (config, source)


@pytest.mark.parametrize(("path", "rest", "given", "expected"), FIELDS, ids=IDS)
def test_absent_is_auto_in_two_phases_as_trainer_fills(
    path: str, rest: dict[str, Any], given: dict[str, Any], expected: Any
) -> None:
    """TrainingArguments do not contain the number of updates, so it is only known when training starts."""
    for config in map(load_config, absent(path, rest)):
        for phase in (TrainingView(**given), TrainingView(total_steps=TOTAL, steps_only=True, **given)):
            views = Views(world_size=2, training=phase)
            findings = examine(config, views, complete=False)
            assert not findings.problems
            write_back(config, findings)
        assert value_of(path, resolve(config, world_size=2)) == expected


def test_no_section_is_made_up() -> None:
    """Without an optimizer section Trainer's own optimizer is used; plain fp32 needs no section either."""
    config = load_config({"zero_optimization": {"stage": 1}})
    write_back(config, examine(config, Views(world_size=1, training=TrainingView()), complete=False))
    assert set(config) == {
        "zero_optimization",
        "gradient_clipping",
        "gradient_accumulation_steps",
        "train_micro_batch_size_per_gpu",
    }


@pytest.mark.parametrize("section", ["bf16", "bfloat16"])
def test_either_name_of_the_section_is_filled(section: str) -> None:
    resolved = resolve({section: {"check_grad_overflow": False}}, TrainingView(bf16=True), world_size=1)
    assert resolved.precision.model == "bf16" and not resolved.precision.skip_nonfinite


def test_fp16_from_nothing_casts_inputs_as_accelerate_has_it() -> None:
    assert resolve({}, TrainingView(fp16=True), world_size=1).precision.auto_cast_inputs
    assert not resolve({"fp16": {}}, TrainingView(fp16=True), world_size=1).precision.auto_cast_inputs


def test_evaluation_in_16_bits_alone_asks_for_no_training_in_them() -> None:
    assert resolve({}, TrainingView(bf16_full_eval=True), world_size=1).precision.model == "fp32"


# type, TrainingArguments, the arguments that it gets
TAKERS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("AdamW", {}, {"lr", "betas", "eps", "weight_decay"}),
    ("Lion", {}, {"lr", "weight_decay"}),
    ("Lion", {"adam_beta2": 0.99}, {"lr", "betas", "weight_decay"}),
    ("Muon", {}, {"lr", "weight_decay"}),  # its own betas and eps differ from Adam's
    ("Muon", {"adam_epsilon": 1e-6}, {"lr", "eps", "weight_decay"}),
    ("SGD", {"adam_beta1": 0.8, "adam_epsilon": 1e-6}, {"lr", "weight_decay"}),
    ("RMSprop", {"adam_epsilon": 1e-6}, {"lr", "eps", "weight_decay"}),
    ("Rprop", {}, {"lr"}),
    ("OneBitAdam", {"adam_beta1": 0.8}, {"lr", "betas", "weight_decay"}),
]


@pytest.mark.parametrize(("kind", "given", "names"), TAKERS)
def test_an_optimizer_gets_what_it_takes(kind: str, given: dict[str, Any], names: set[str]) -> None:
    resolved = resolve({"optimizer": {"type": kind}}, TrainingView(**given), world_size=1)
    assert resolved.optimizer is not None and set(resolved.optimizer.params) == names


SCHEDULES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("WarmupLR", {"warmup_steps": 5}, {"warmup_max_lr", "warmup_num_steps"}),
    ("WarmupLR", {}, {"warmup_max_lr"}),  # TrainingArguments' default is no warm-up: the schedule keeps its own
    ("WarmupCosineLR", {"warmup_steps": 5}, {"total_num_steps", "warmup_num_steps"}),
    ("LRRangeTest", {"warmup_steps": 5}, set()),
    ("CosineAnnealingLR", {"warmup_steps": 5}, set()),
]


@pytest.mark.parametrize(("kind", "given", "names"), SCHEDULES)
def test_a_schedule_gets_what_it_takes(kind: str, given: dict[str, Any], names: set[str]) -> None:
    resolved = resolve({"scheduler": {"type": kind}}, view(given), world_size=1)
    assert resolved.scheduler is not None and set(resolved.scheduler.params) == names


def test_a_batch_size_that_is_looked_for_does_not_contradict_a_fixed_total() -> None:
    looking = TrainingView(per_device_train_batch_size=3, batch_size_may_vary=True)
    assert resolve({"train_batch_size": 16}, looking, world_size=2).batch.micro_batch_size == 8
    assert resolve({}, looking, world_size=2).batch.train_batch_size == 6


def test_what_a_script_gives_to_the_stand_ins_holds_too() -> None:
    """DummyOptim(lr=0.5) with an optimizer section without a learning rate trained at 0.001."""
    config = {"train_batch_size": 2, **ADAMW, **DECAY}
    view = AcceleratorView(
        prepares=True,
        batch_sizes=(2,),
        optimizer={"lr": 0.5, "weight_decay": 0},
        schedule={"warmup_num_steps": 3, "total_num_steps": 9},
    )
    resolved = resolve(config, None, view, world_size=1)
    assert resolved.optimizer is not None and resolved.optimizer.params == {"lr": 0.5}
    assert resolved.scheduler is not None
    assert resolved.scheduler.params == {"warmup_num_steps": 3, "total_num_steps": 9}


def test_where_nobody_states_anything_absent_is_the_default() -> None:
    view = AcceleratorView(prepares=True, batch_sizes=(2,), optimizer={"lr": 0.001, "weight_decay": 0})
    resolved = resolve({"train_batch_size": 2, **ADAMW}, None, view, world_size=1)
    assert resolved.optimizer is not None and resolved.optimizer.params == {}
    assert resolved.gradients.clip_norm == 1.0
