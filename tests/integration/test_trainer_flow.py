"""Trainer with ds.json through hf_zero: filled values, errors, evaluation only, weight decay groups."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero

hf_zero.install()

from transformers import Trainer  # noqa: E402

from hf_zero import ConfigError  # noqa: E402
from tests.support.hosts import PLAIN_TRAINER_ACCUMULATES, WHY_NOT  # noqa: E402
from tests.support.messages import heard  # noqa: E402
from tests.support.ranks import run_ranks  # noqa: E402

from .flows import ADAMW, BASE, WARMUP_DECAY, arguments, clean, trainer, write  # noqa: E402

pytestmark = [pytest.mark.usefixtures("fresh"), pytest.mark.lengthy]


@pytest.fixture
def fresh(clean_libraries: None) -> Iterator[None]:
    with heard() as said:
        yield
    assert not [line for line in said if "steps aside" in line]


def refused(folder: Path, config: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        arguments(folder, config, **options)
    return str(caught.value)


def test_a_commented_file_is_read_and_filled(tmp_path: Path) -> None:
    path = write(tmp_path, {**BASE, "gradient_clipping": "auto", "bf16": {"enabled": "auto"}})
    config = arguments(tmp_path, str(path), bf16=True, max_grad_norm=0.25).hf_deepspeed_config.config
    assert config["gradient_clipping"] == 0.25 and config["bf16"] == {"enabled": True}
    assert config["train_batch_size"] == config["train_micro_batch_size_per_gpu"] == 2


@pytest.mark.parametrize("sections", [{}, {"optimizer": ADAMW}, {"optimizer": ADAMW, "scheduler": WARMUP_DECAY}])
def test_the_rate_in_the_log_is_that_of_the_update(sections: dict[str, Any], tmp_path: Path) -> None:
    """An optimizer from ds.json with a schedule from code logged a learning rate one step ahead of plain Trainer's."""
    options: dict[str, Any] = {"max_steps": 3, "logging_steps": 1, "learning_rate": 0.3, "report_to": "none"}
    run = trainer(tmp_path, {**BASE, **sections}, **options)
    run.train()
    rates = [line["learning_rate"] for line in run.state.log_history if "learning_rate" in line]
    if "scheduler" in sections:
        assert rates[:2] == [0, 0]  # DeepSpeed's warm-up runs its first two updates at the minimum
    else:
        assert rates == pytest.approx([0.3, 0.2, 0.1])


def test_a_duplicate_key_is_an_error_with_both_places(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1},\n "zero_optimization": {"stage": 2}}')
    message = refused(tmp_path, str(path))
    assert "'zero_optimization' is given twice, first at line 1, column 2" in message and f"{path}:2:2" in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "there is no such file" in refused(tmp_path, str(tmp_path / "absent.json"))


@pytest.mark.parametrize("section", ["optimizer", "zero_optimization", "bf16"])
def test_a_section_that_is_no_section(section: str, tmp_path: Path) -> None:
    message = refused(tmp_path, {**BASE, section: "AdamW"})
    assert f"{section} = 'AdamW'" in message and "must be an object {...}" in message


def test_all_problems_come_before_the_model_is_loaded(tmp_path: Path) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "lerning": 1}}
    config = {**BASE, "optimizer": optimizer, "gradient_clipping": 3, "zero_optimisation": 1, "bf16": {"enabled": True}}
    path = write(tmp_path, config)
    message = refused(tmp_path, str(path), learning_rate=1e-4)
    for words in (
        "(5 problems)",
        f"zero_optimisation = 1  [{path}:",
        "optimizer.params.lr = 0.001",
        "but:  learning_rate = 0.0001  [TrainingArguments.learning_rate]",
        "optimizer.params.lerning = 1",
        "gradient_clipping = 3",
        "but:  max_grad_norm = 1.0",
        "bf16.enabled = true",
        "but:  bf16 = false",
    ):
        assert words in message, words


def test_a_contradiction_begins_with_the_words_of_transformers(tmp_path: Path) -> None:
    """Users search for them."""
    given = {**BASE, "gradient_accumulation_steps": 3, "gradient_clipping": 0.25, "bf16": {"enabled": "auto"}}
    with pytest.raises(ConfigError) as caught:
        arguments(tmp_path, given, gradient_accumulation_steps=2, max_grad_norm=1.0)
    first, _, rest = str(caught.value).partition("\nhf_zero found in this config (2 problems):\n")
    assert first.startswith("Please correct the following DeepSpeed config values that mismatch TrainingArguments")
    assert "- ds gradient_accumulation_steps=3 vs hf gradient_accumulation_steps=2" in first
    assert caught.value.__suppress_context__  # one error, not "during handling of the above exception, another"
    assert "1. gradient_accumulation_steps = 3" in rest and "but:  max_grad_norm = 1.0" in rest


def test_what_only_hf_zero_finds_stands_alone(tmp_path: Path) -> None:
    message = refused(tmp_path, {**BASE, "autotuning": {"enabled": True, "mp_size": 2}})
    assert message.startswith("this config cannot be used (1 problem):")


def test_unfilled_autos_train(tmp_path: Path) -> None:
    """With each of these accelerate raises "not found in kwargs"."""
    config = {
        **BASE,
        "zero_optimization": {"stage": 2, "overlap_comm": "auto", "allgather_bucket_size": "auto"},
        "bf16": {"enabled": False, "check_grad_overflow": "auto"},
        "communication_data_type": "auto",
        "wall_clock_breakdown": "auto",
        "data_types": {"keep_in_fp32_modules": "auto"},
        "optimizer": {"type": "AdamW", "params": {**ADAMW["params"], "bias_correction": "auto"}},
    }
    assert trainer(tmp_path, config).train().global_step == 2


def trained_with_ratio(rank: int, path: str, ratio: Any) -> list[float]:
    """Losses of two updates."""
    run = trainer(Path(path).parent, path)
    assert run.train().global_step == 2
    engine = run.model_wrapped
    assert engine.settings.resolved.zero.offload_optimizer.ratio == ratio
    assert run.accelerator.deepspeed_config["zero_optimization"]["offload_optimizer"]["ratio"] == ratio
    source = engine.settings.resolved.provenance["zero_optimization.offload_optimizer.ratio"].source
    assert source.kind == "file"
    return [line["loss"] for line in run.state.log_history if "loss" in line]


def test_a_ratio_of_auto_reaches_the_engine(tmp_path: Path) -> None:
    """accelerate refuses every "auto" that nobody fills in, and hf_zero removed those that were left: the default would
    have trained. On CPUs both are the same."""
    found = []
    for ratio in ("auto", 1.0):
        folder = tmp_path / str(ratio)
        folder.mkdir()
        offload = {"device": "cpu", "ratio": ratio}
        path = write(folder, {**BASE, "zero_optimization": {"stage": 2, "offload_optimizer": offload}})
        found.append(run_ranks(trained_with_ratio, 2, str(path), ratio, init=False))
    assert found[0] == found[1] and len(found[0][0]) == 2


def test_numbers_as_text_and_floats_train(tmp_path: Path) -> None:
    """accelerate multiplies these without conversion: "2" x 2 would be "22"."""
    config = {
        "train_micro_batch_size_per_gpu": "2",
        "gradient_accumulation_steps": 2.0,
        "train_batch_size": "auto",
        "zero_optimization": {"stage": "1", "offload_optimizer": None},
        "optimizer": None,
        "fp16": None,
    }
    run = trainer(tmp_path, config, gradient_accumulation_steps=2)
    assert run.train().global_step == 2
    assert run.deepspeed.get_batch_info() == (4, 2, 2) and run.deepspeed.zero_optimization_stage() == 1


@pytest.mark.parametrize("config", [{"zero_optimization": True}, {"zero_optimization": None}])
def test_old_and_empty_forms_of_zero_optimization_train(config: dict[str, Any], tmp_path: Path) -> None:
    assert trainer(tmp_path, {**BASE, **config}).train().global_step == 2


def test_a_missing_zero_section_is_named_with_all_else(tmp_path: Path) -> None:
    """accelerate checks this later, reports nothing else, and does not say what to write."""
    config = {key: value for key, value in BASE.items() if key != "zero_optimization"}
    message = refused(tmp_path, {**config, "gradient_clipping": 3})
    assert "(2 problems)" in message and "gradient_clipping = 3" in message
    assert "zero_optimization\n    rule: accelerate" in message and 'add "zero_optimization": {"stage": 2}' in message


def test_a_misspelled_zero_section_is_named_alone(tmp_path: Path) -> None:
    """`zero_optimisation` was reported, and also "accelerate asks for this section" about zero_optimization."""
    with pytest.raises(ConfigError) as raised:
        arguments(tmp_path, {"train_micro_batch_size_per_gpu": "auto", "zero_optimisation": {"stage": 2}})
    assert [problem.path for problem in raised.value.problems] == ["zero_optimisation"]


def test_a_drive_that_is_not_there_is_named_before_the_model_is_built(tmp_path: Path) -> None:
    """The folder of NVMe offload was looked for when the engine allocates its states, after the weights were loaded."""
    offload = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "none")}}
    path = write(tmp_path, {**BASE, "zero_optimization": {"stage": 2, **offload}})
    with pytest.raises(ConfigError, match=r"nvme_path = .*ds.json:10\]\n.*not an existing folder of this machine"):
        arguments(tmp_path, str(path))


def test_checkpoints_and_weights_alone(tmp_path: Path) -> None:
    assert trainer(tmp_path, BASE, save_strategy="steps").train().global_step == 2
    assert (tmp_path / "checkpoint-2" / "latest").read_text() == "global_step2"
    assert trainer(tmp_path, BASE, save_strategy="steps", save_only_model=True).train().global_step == 2
    assert (tmp_path / "checkpoint-2" / "model.safetensors").stat().st_size > 0


def test_where_there_is_no_engine_the_pair_stays_refused(tmp_path: Path) -> None:
    """Only a run with hf_zero can load the best model from saved weights only; FSDP cannot."""
    from hf_zero.integration.patches.transformers_trainer import around_start

    class Args:
        save_only_model = load_best_model_at_end = True
        deepspeed_plugin = None

    class Run:
        args = Args()

    seen: list[bool] = []
    around_start(lambda run: seen.append(run.args.load_best_model_at_end), Run())
    Args.deepspeed_plugin = object()  # type: ignore[assignment]
    around_start(lambda run: seen.append(run.args.load_best_model_at_end), Run())
    assert seen == [True, False] and Run.args.load_best_model_at_end


def test_a_search_for_the_batch_size_at_stage_3(tmp_path: Path) -> None:
    """transformers itself raises an error when a Trainer is created, and names the alternative."""
    with pytest.raises(ValueError, match="`auto_find_batch_size` isn't supported yet with DeepSpeed Zero-3"):
        trainer(tmp_path, {**BASE, "zero_optimization": {"stage": 3}}, auto_find_batch_size=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_evaluation_without_training(stage: int, tmp_path: Path) -> None:
    config = {**BASE, "zero_optimization": {"stage": stage, "reduce_bucket_size": "auto"}, "optimizer": ADAMW}
    run = trainer(tmp_path, config)
    assert run.evaluate()["eval_loss"] > 0
    assert run.predict(run.eval_dataset).metrics["test_loss"] > 0
    assert run.deepspeed.optimizer is None


def evaluate_in_16_bits(rank: int, folder: str) -> None:
    config = {**BASE, "zero_optimization": {"stage": 3}, "optimizer": ADAMW}
    with heard() as said:
        assert trainer(Path(folder), config, bf16_full_eval=True).evaluate()["eval_loss"] > 0
        clean()
        run = trainer(Path(folder), config, bf16_full_eval=True)
        run.train()
        asked = run.evaluate()["eval_loss"]
        assert run.args.bf16_full_eval
        run.args.bf16_full_eval = False
        assert asked == run.evaluate()["eval_loss"]
    assert sum("bf16_full_eval: evaluated in torch.float32" in line for line in said) == 1


def test_evaluation_in_16_bits_at_stage_3(tmp_path: Path) -> None:
    """It failed, or cast the few weights that are whole: Trainer casts the weights for an evaluation outside of
    training. While it trains, it evaluates them as they are."""
    run_ranks(evaluate_in_16_bits, 2, str(tmp_path), init=False)


def evaluate_alone(rank: int, folder: str) -> float:
    run = trainer(Path(folder), {**BASE, "optimizer": ADAMW})
    loss: float = run.evaluate()["eval_loss"]
    return loss


def test_evaluation_without_training_on_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(evaluate_alone, 2, str(tmp_path), init=False)
    assert first == second == pytest.approx(evaluate_alone(0, str(tmp_path)), rel=1e-5)


def test_evaluation_before_training_takes_nothing_from_it(tmp_path: Path) -> None:
    config = {**BASE, "optimizer": ADAMW, "scheduler": WARMUP_DECAY}
    run = trainer(tmp_path, config, weight_decay=0.1, learning_rate=0.1, warmup_steps=2, max_steps=4)
    before = run.evaluate()["eval_loss"]
    run.train()
    params = run.args.hf_deepspeed_config.config["scheduler"]["params"]
    assert (params["total_num_steps"], params["warmup_num_steps"]) == (4, 2)
    assert type(run.deepspeed.lr_scheduler).__name__ == "WarmupDecayLR"
    assert len(run.deepspeed.optimizer.param_groups) == 2
    assert run.evaluate()["eval_loss"] != before


def test_training_twice(tmp_path: Path) -> None:
    run = trainer(tmp_path, BASE)
    first, second = run.train(), run.train()
    assert first.global_step == second.global_step == 2 and second.training_loss < first.training_loss


@pytest.mark.parametrize("save_only_model", [False, True])
def test_two_trainers_with_the_same_arguments(save_only_model: bool, tmp_path: Path) -> None:
    """accelerate refused the second: "You cannot pass in a `deepspeed_plugin` when creating a second `Accelerator`"."""
    first = trainer(tmp_path, BASE, save_only_model=save_only_model)
    plugin, losses = first.args.deepspeed_plugin, []
    for _ in range(2):
        torch.manual_seed(0)
        again = Trainer(copy.deepcopy(first.model), first.args, train_dataset=first.train_dataset)
        losses.append(again.train().training_loss)
        assert again.args.deepspeed_plugin is plugin is again.accelerator.state.deepspeed_plugin
    assert losses[0] == losses[1] == first.train().training_loss


@pytest.mark.parametrize("fixed", [False, True])
def test_arguments_that_change_later_are_followed(fixed: bool, tmp_path: Path) -> None:
    """`trainer.args.learning_rate = ...` before another train() silently had no effect if the optimizer section's rate
    is "auto", because the file was filled when TrainingArguments were created. Explicit values of the file stay."""
    given = {"type": "AdamW", "params": {"lr": 0.2, "weight_decay": 0.3}} if fixed else ADAMW
    options = {"learning_rate": 0.2, "weight_decay": 0.3, "lr_scheduler_type": "constant"}
    run = trainer(tmp_path, {**BASE, "optimizer": given}, **options)
    rates = []
    for rate, decay in ((0.1, 0.0), (0.05, 0.4)):
        run.args.learning_rate, run.args.weight_decay, run.args.max_grad_norm = rate, decay, rate
        run.train()
        rates.append([line["learning_rate"] for line in run.state.log_history if "learning_rate" in line][0])
    decays = {group["weight_decay"] for group in run.deepspeed.optimizer.param_groups}
    assert (rates, decays) == (([0.2, 0.2], {0.3, 0.0}) if fixed else ([0.1, 0.05], {0.4, 0.0}))
    assert run.deepspeed.gradient_clipping() == 0.05


def trained(folder: Path, config: Any, **options: Any) -> dict[str, torch.Tensor]:
    """The weights after three updates, by the engine or, without a config, by PyTorch alone."""
    torch.manual_seed(3)
    run = trainer(folder, config, max_steps=3, learning_rate=0.5, **options)
    run.train()
    return {name: value.detach().clone() for name, value in run.model.named_parameters()}


LEFT_OUT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"optim": "sgd", "max_grad_norm": 100.0}),
    ({}, {"optim": "sgd", "max_grad_norm": 0.0}),
    ({}, {"optim": "sgd", "gradient_accumulation_steps": 2}),
    ({"optimizer": {"type": "SGD"}}, {"optim": "sgd", "weight_decay": 0.1}),
    (
        {"optimizer": {"type": "AdamW"}},
        {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 0.1, "weight_decay": 0.1},
    ),
]


@pytest.mark.parametrize(("sections", "options"), LEFT_OUT)
def test_what_the_file_leaves_out_is_as_trainer_alone_has_it(
    sections: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """With `max_grad_norm=100` and no `gradient_clipping` in ds.json, gradients were clipped at 1.0. An optimizer
    section without params trained at 0.001 regardless of TrainingArguments. Both were silent."""
    if options.get("gradient_accumulation_steps", 1) > 1 and not PLAIN_TRAINER_ACCUMULATES:
        pytest.skip(WHY_NOT)
    alone = trained(tmp_path, None, **options)
    clean()
    ours = trained(tmp_path, {"zero_optimization": {"stage": 2}, **sections}, **options)
    for name, value in alone.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_of_a_metric_is_trainers_own(kind: str, tmp_path: Path) -> None:
    """With an optimizer from ds.json the engine got this schedule, and the first update failed with "step() missing 1
    required positional argument: 'metrics'"."""
    options = {"max_steps": 4, "learning_rate": 0.5, "lr_scheduler_type": kind, "eval_strategy": "steps"}
    options |= {"eval_steps": 1, "metric_for_best_model": "loss"}
    rates = []
    for config in (None, {**BASE, "optimizer": {"type": "AdamW"}}):
        clean()
        torch.manual_seed(3)
        run = trainer(tmp_path, config, lr_scheduler_kwargs={"patience": 0}, **options)
        run.train()
        rates.append([line["learning_rate"] for line in run.state.log_history if "learning_rate" in line])
    assert rates[0] == rates[1] and len(set(rates[0])) > 1


def with_own_optimizers(folder: Path, config: Any, kind: type[torch.optim.Optimizer]) -> Trainer:
    """A Trainer with a given optimizer of two groups, and a schedule for it."""
    run = trainer(folder, config, max_steps=3)
    norms = [parameter for parameter in run.model.parameters() if parameter.ndim == 1]
    matrices = [parameter for parameter in run.model.parameters() if parameter.ndim > 1]
    run.optimizer = kind([{"params": matrices, "lr": 1e-3}, {"params": norms, "lr": 0.1}], lr=1e-2)
    run.lr_scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, step_size=1, gamma=0.5)
    return run


RMSPROP, ADAMW_OF_TORCH, ADAGRAD = torch.optim.RMSprop, torch.optim.AdamW, torch.optim.Adagrad
BY_DEFAULT = ((0, RMSPROP), (2, ADAGRAD), (3, ADAMW_OF_TORCH))


@pytest.mark.parametrize(
    ("stage", "kind"),
    [
        pytest.param(*cell, marks=[] if cell in BY_DEFAULT else [pytest.mark.slow])
        for cell in itertools.product((0, 2, 3), (RMSPROP, ADAMW_OF_TORCH, ADAGRAD))
    ],
)
def test_optimizers_that_a_trainer_is_given_train(
    stage: int, kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    """`Trainer(optimizers=...)` silently had no effect: with an engine upstream sets both to None, and trained with the
    AdamW and the linear schedule of TrainingArguments."""
    runs = []
    for config in (None, {**BASE, "zero_optimization": {"stage": stage}}):
        clean()
        torch.manual_seed(3)
        runs.append(with_own_optimizers(tmp_path, config, kind))
        first = runs[-1].train()
    alone, ours = runs
    rates = [[entry.get("learning_rate") for entry in run.state.log_history] for run in runs]
    assert rates[0] == rates[1] == [1e-3, 5e-4, 2.5e-4, None]
    for name, value in alone.model.named_parameters():
        torch.testing.assert_close(ours.model.get_parameter(name), value, rtol=1e-4, atol=1e-5)

    schedule, optimizer = ours.lr_scheduler, ours.optimizer.optimizer.optimizer
    assert ours.train().training_loss < first.training_loss
    assert (ours.lr_scheduler, ours.optimizer.optimizer.optimizer) == (schedule, optimizer)
    assert ours.state.log_history[0]["learning_rate"] == 1.25e-4  # both continue


GIVEN: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"optimizer": ADAMW}, "the optimizer RMSprop, but the config has its own, of type AdamW"),
    ({"optimizer": ADAMW}, "the scheduler StepLR, but it changes the learning rate of an optimizer that"),
    ({"scheduler": WARMUP_DECAY}, "the scheduler StepLR, but the config has its own, of type WarmupDecayLR"),
]


@pytest.mark.parametrize(("sections", "words"), GIVEN)
def test_a_given_optimizer_that_the_file_overrules_is_said(
    sections: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    run = with_own_optimizers(tmp_path, {**BASE, **sections}, torch.optim.RMSprop)
    with heard() as said:
        run.train()
    lines = [line for line in said if "Trainer(optimizers=...)" in line]
    assert bool(lines) == bool(words) and any(str(words) in line for line in lines) == bool(words)
    assert (type(run.lr_scheduler).__name__ == "StepLR") == (not sections)


GROUPS = [
    ({"weight_decay": "auto"}, {}, 2),
    ({"weight_decay": 0.1}, {}, 2),
    ({"weight_decay": "auto"}, {"hf_zero": {"decay_biases_and_norms": True}}, 1),
    ({}, {}, 2),
]


@pytest.mark.parametrize(("params", "more", "groups"), GROUPS)
def test_weight_decay_spares_biases_and_norms(
    params: dict[str, Any], more: dict[str, Any], groups: int, tmp_path: Path
) -> None:
    config = {**BASE, **more, "optimizer": {"type": "AdamW", "params": {"lr": "auto", **params}}}
    run = trainer(tmp_path, config, weight_decay=0.1)
    run.train()
    decays = [group["weight_decay"] for group in run.deepspeed.optimizer.param_groups]
    assert decays == {2: [0.1, 0.0], 1: [0.1]}[groups]


def test_trainer_finds_the_group_of_a_parameter(tmp_path: Path) -> None:
    """`get_optimizer_group` asks whether the parameter equals one in a group, where shards of another size are."""
    run = trainer(tmp_path, {**BASE, "optimizer": ADAMW}, weight_decay=0.1)
    run.train()
    decaying = set(run.get_decay_parameter_names(run.model))
    groups = {name: run.get_optimizer_group(parameter) for name, parameter in run.model.named_parameters()}
    assert {name for name, group in groups.items() if group["weight_decay"] == 0.1} == decaying < groups.keys()
    assert len(run.get_optimizer_group()) == len(run.get_optimizer_group(torch.nn.Parameter(torch.ones(1)))) == 2


def test_auto_find_batch_size_follows_to_the_engine(tmp_path: Path) -> None:
    run = trainer(tmp_path, BASE, per_device_train_batch_size=4, auto_find_batch_size=True)
    step, seen = run.training_step, []

    def training_step(model: Any, inputs: Any, *more: Any) -> Any:
        seen.append(len(inputs["input_ids"]))
        if seen[-1] > 2:
            raise RuntimeError("CUDA out of memory. (imitated)")
        return step(model, inputs, *more)

    run.training_step = training_step
    run.train()
    assert seen[0] == 4 and seen[-1] <= 2
    assert run.deepspeed.train_micro_batch_size_per_gpu() == seen[-1]


def test_total_steps_that_differ_are_named_with_their_place(tmp_path: Path) -> None:
    params = {"total_num_steps": 7, "warmup_num_steps": "auto"}
    config = {**BASE, "scheduler": {"type": "WarmupDecayLR", "params": params}}
    run = trainer(tmp_path, config, max_steps=-1, num_train_epochs=1)
    with pytest.raises(ConfigError, match="scheduler.params.total_num_steps = 7") as caught:
        run.train()
    assert "but:  updates of this run = 4" in str(caught.value)


def test_a_model_whose_size_sits_nowhere(tmp_path: Path) -> None:
    config = {**BASE, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    run = trainer(tmp_path, config)
    run.args.hf_deepspeed_config.trainer_config_finalize(run.args, NoConfig(run.model), 2)
    size = run.args.hf_deepspeed_config.config["zero_optimization"]["reduce_bucket_size"]
    assert size == run.model.config.hidden_size**2


class NoConfig:
    """A model with parameters, but without a config."""

    def __init__(self, model: Any) -> None:
        self.parameters = model.parameters


def test_saved_arguments_open_without_hf_zero(tmp_path: Path) -> None:
    import pickle

    saved = pickle.dumps(arguments(tmp_path, BASE).hf_deepspeed_config.config)
    assert b"hf_zero" not in saved and json.dumps(pickle.loads(saved))


def test_the_users_own_dict_stays_as_it_is(tmp_path: Path) -> None:
    config = {**BASE, "optimizer": ADAMW}
    before = json.dumps(config)
    given = arguments(tmp_path, config)
    assert json.dumps(config) == before and given.deepspeed is config


def test_views_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    from hf_zero.config import TrainingView

    names = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    for field in dataclasses.fields(TrainingView):
        if field.name in names:
            assert field.default == names[field.name], field.name


OVERRULED: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    ({"scheduler": WARMUP_DECAY}, {"lr_scheduler_type": "cosine"}, "lr_scheduler_type is 'cosine'"),
    ({"scheduler": WARMUP_DECAY}, {"lr_scheduler_type": "linear"}, None),
    ({}, {"lr_scheduler_type": "cosine"}, None),
    ({"optimizer": ADAMW}, {"optim": "adafactor"}, "optim is 'adafactor'"),
    ({"optimizer": ADAMW}, {"optim": "adamw_torch"}, None),
]


@pytest.mark.parametrize(("sections", "options", "words"), OVERRULED)
def test_a_choice_that_the_file_overrules_is_said(
    sections: dict[str, Any], options: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    with heard() as said:
        arguments(tmp_path, {**BASE, **sections}, **options)
    lines = [line for line in said if "the config decides" in line]
    assert len(lines) == (words is not None) and all(str(words) in line for line in lines)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_healthy_run_says_what_it_is_and_warns_of_nothing(stage: int, tmp_path: Path) -> None:
    """The message that ZeRO is enabled was a warning, because Trainer's default log level hides info."""
    with heard(records := []):
        run = trainer(tmp_path, {**BASE, "zero_optimization": {"stage": stage}}, save_strategy="steps", save_steps=2)
        run.train()
    assert {record.levelname for record in records} == {"INFO"}
    (block,) = [record.getMessage() for record in records if "DeepSpeed info" in record.getMessage()]
    assert f"ZeRO stage {stage}, fp32, 1 rank, 2 x 1 x 1 = 2 samples per update" in block
    assert '"auto": 4 values filled in' in block
    assert "2 updates in" in records[-1].getMessage()


def test_the_level_of_a_trainer_is_ours(tmp_path: Path) -> None:
    with heard() as said:
        trainer(tmp_path, BASE, log_level="error").train()
    assert said == []
