"""Generated configs give the same values as in transformers, accelerate and DeepSpeed, with the listed exceptions."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hf_zero

hf_zero.install()

import deepspeed  # noqa: E402
from accelerate.accelerator import Accelerator  # noqa: E402
from accelerate.utils import DeepSpeedPlugin  # noqa: E402
from transformers import TrainingArguments  # noqa: E402
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig  # noqa: E402

from hf_zero.config import ConfigError, ModelView, Views, load_config, resolve  # noqa: E402
from hf_zero.config.fill import fill  # noqa: E402
from hf_zero.config.hosts import normalise, write  # noqa: E402
from hf_zero.config.rename import rename  # noqa: E402
from hf_zero.integration.huggingface.views import training_view  # noqa: E402
from hf_zero.integration.patches import MARK  # noqa: E402
from tests.config.deepspeed_answers import ask_deepspeed  # noqa: E402
from tests.config.test_published import ACCEPTED, REFUSED  # noqa: E402

from .combinations import COUNT, Combination, combinations  # noqa: E402
from .flows import ADAMW, accelerator, clean, loader  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.lengthy]
ALL = list(combinations())
HIDDEN = 16


@pytest.fixture
def plain(one_rank: None, tmp_path: Path) -> TrainingArguments:
    """TrainingArguments without any ds.json; the combinations change copies of it."""
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], save_strategy="no")


def original(function: Any) -> Any:
    """Upstream's original of a patched function."""
    return getattr(function, MARK)


def arguments_of(combination: Combination, plain: TrainingArguments) -> TrainingArguments:
    arguments = copy.copy(plain)
    for name, value in combination.arguments.items():
        object.__setattr__(arguments, name, value)
    return arguments


def through_trainer(combination: Combination, plain: TrainingArguments, *, ours: bool) -> dict[str, Any] | None:
    """The config after both phases; None if it is rejected."""
    arguments = arguments_of(combination, plain)
    process, finalize = (
        HfTrainerDeepSpeedConfig.trainer_config_process,
        HfTrainerDeepSpeedConfig.trainer_config_finalize,
    )
    if not ours:
        process, finalize = original(process), original(finalize)
    config = HfTrainerDeepSpeedConfig(copy.deepcopy(combination.config))
    try:
        process(config, arguments)
        # Its constructor fills what a launcher may set; for a Trainer that is the stage and the gathering on save.
        DeepSpeedPlugin(hf_ds_config=config)
        finalize(config, arguments, MODEL, combination.total_steps)
    except ValueError:
        return None
    return config.config


def spelled_out(combination: Combination) -> Combination:
    """With "auto" at the absent keys that TrainingArguments contain, as hf_zero interprets them."""
    config = copy.deepcopy(combination.config)
    config.setdefault("gradient_clipping", "auto")
    if combination.arguments["bf16"]:
        config.setdefault("bf16", {"enabled": "auto"})
    if "optimizer" in config:
        config["optimizer"]["params"] = {**ADAMW["params"], **config["optimizer"]["params"]}
    return dataclasses.replace(combination, config=config)


def meaning(config: dict[str, Any]) -> Any:
    """The effect of a config on the engine, without differences that are only in its text."""
    resolved = resolve(config, world_size=1)
    parts = (resolved.batch, resolved.precision, resolved.zero, resolved.gradients)
    chosen = [policy and (policy.type, dict(policy.params)) for policy in (resolved.optimizer, resolved.scheduler)]
    return (*parts, *chosen)


def test_trainer_fills_the_same(plain: TrainingArguments) -> None:
    refused = 0
    for combination in ALL:
        theirs = through_trainer(spelled_out(combination), plain, ours=False)
        ours = through_trainer(combination, plain, ours=True)
        assert (ours is None) == (theirs is None), combination
        if ours is None or theirs is None:
            refused += 1
            continue
        assert meaning(ours) == meaning(theirs), combination
        leftover = {path for path in flat(theirs) if flat(theirs)[path] == "auto"}
        assert {path: value for path, value in flat(theirs).items() if path not in leftover} == flat(ours), combination
    assert COUNT >= 200 and COUNT // 5 < refused < COUNT * 4 // 5


def theirs_by_key(config: dict[str, Any], arguments: TrainingArguments, total: int) -> tuple[dict[str, Any], set[str]]:
    """transformers' own two phases: the values, and the keys reported as mismatched."""
    holder = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    original(HfTrainerDeepSpeedConfig.trainer_config_process)(holder, arguments)
    with contextlib.suppress(ValueError):
        original(HfTrainerDeepSpeedConfig.trainer_config_finalize)(holder, arguments, MODEL, total)
    return flat(holder.config), {line.split("=")[0].removeprefix("- ds ") for line in holder.mismatches}


def ours_by_key(config: dict[str, Any], arguments: TrainingArguments, total: int) -> tuple[dict[str, Any], set[str]]:
    """The same from the resolver's filling alone, regardless of what the engine supports."""
    own = load_config(config)
    normalise(own)
    training = training_view(arguments, total_steps=total)
    views = Views(world_size=1, training=training, model=ModelView(config={"hidden_size": HIDDEN}))
    draft = fill(rename(own, views))
    write(own, draft.filled)
    return flat(own), {problem.path for problem in draft.problems()}


PUBLISHED = {**ACCEPTED, **{name: config for name, (config, _) in REFUSED.items()}}
MODEL = SimpleNamespace(config=SimpleNamespace(hidden_size=HIDDEN), parameters=lambda: iter(()))
# Below stage 3 Trainer leaves these two to accelerate, which gives them the same values.
LATER = {f"zero_optimization.stage3_{key}" for key in ("prefetch_bucket_size", "param_persistence_threshold")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_are_filled_the_same(name: str, plain: TrainingArguments) -> None:
    batch = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    for arguments in (ALL[0].arguments, ALL[1].arguments):
        combination = Combination({**batch, **PUBLISHED[name]}, arguments, 60)
        compare_by_key(combination, plain)


def test_generated_settings_are_filled_the_same_and_clash_at_the_same_keys(plain: TrainingArguments) -> None:
    for combination in ALL:
        compare_by_key(combination, plain)


def compare_by_key(combination: Combination, plain: TrainingArguments) -> None:
    arguments, total = arguments_of(combination, plain), combination.total_steps
    theirs, mismatched = theirs_by_key(combination.config, arguments, total)
    ours, clashing = ours_by_key(combination.config, arguments, total)
    assert clashing == mismatched, combination
    differing = {key for key in theirs if theirs[key] != ours.get(key, "(absent)")}
    assert differing <= LATER and not {key for key in differing if theirs[key] != "auto"}, combination


def flat(config: dict[str, Any], around: str = "") -> dict[str, Any]:
    """Values by path; 4.0 and 4 are equal."""
    result: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            result |= flat(value, f"{around}{key}.")
        else:
            result[around + key] = value
    return result


class Caught(Exception):
    """Carries the arguments that upstream would have passed to deepspeed.initialize."""

    def __init__(self, **given: Any) -> None:
        self.config = given["config_params"]


def through_accelerate(combination: Combination, *, ours: bool) -> dict[str, Any] | None:
    """The config that `prepare` passes on; None if it is rejected."""
    clean()
    os.environ.update({"LOCAL_RANK": "0"})
    config = copy.deepcopy(combination.config)
    # A script without TrainingArguments has no betas and eps: upstream rejects those autos, see docs/differences.md.
    for name in ("betas", "eps"):
        if config.get("optimizer", {}).get("params", {}).get(name) == "auto":
            del config["optimizer"]["params"][name]
    rate, decay = combination.arguments["learning_rate"], combination.arguments["weight_decay"]
    if "optimizer" in config and not ours:
        # Values that hf_zero takes from DummyOptim if the config lacks them, written out for upstream.
        stated = {"lr": rate != 0.001, "weight_decay": decay != 0}
        autos = {name: "auto" for name, is_stated in stated.items() if is_stated}
        config["optimizer"]["params"] = {**autos, **config["optimizer"]["params"]}
    acc = accelerator(config, gradient_accumulation_steps=combination.arguments["gradient_accumulation_steps"])
    model = torch.nn.Linear(HIDDEN, HIDDEN)
    model.config = SimpleNamespace(hidden_size=HIDDEN)  # type: ignore[assignment]
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=rate)
    if "optimizer" in config:
        optimizer = hf_zero.DummyOptim(model.parameters(), lr=rate, weight_decay=decay)
    objects = [model, optimizer, loader(combination.arguments["per_device_train_batch_size"])]
    if "scheduler" in config:
        objects.append(hf_zero.DummyScheduler(optimizer, combination.total_steps, 2))
    prepare = Accelerator._prepare_deepspeed
    try:
        (prepare if ours else original(prepare))(acc, *objects)
    except Caught as caught:
        return caught.config
    except ValueError:
        return None
    raise AssertionError("deepspeed.initialize was not called")


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_accelerate_fills_the_same(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def initialize(**given: Any) -> None:
        raise Caught(**given)

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    refused = 0
    for combination in ALL[::every]:
        theirs, ours = (through_accelerate(combination, ours=which) for which in (False, True))
        if ours is None:
            # Only what DeepSpeed itself would reject: accelerate does not check the batch equation.
            refused += 1
            assert theirs is not None
            with pytest.raises(ConfigError) as caught:
                resolve(theirs, world_size=1)
            assert {problem.path for problem in caught.value.problems} == {"train_batch_size"}
            continue
        assert theirs is not None, combination
        assert flat(ours) == flat(theirs), combination
    assert refused < len(ALL[::every]) // 4


DEEPSPEED_PROGRAM = """
from deepspeed.runtime.config import DeepSpeedConfig
def facts(config):
    try:
        done = DeepSpeedConfig(config)
    except Exception as error:
        return None
    zero = done.zero_config
    return [done.train_batch_size, done.train_micro_batch_size_per_gpu, done.gradient_accumulation_steps,
            done.gradient_clipping, done.bfloat16_config.enabled, zero.stage,
            min(zero.reduce_bucket_size, zero.allgather_bucket_size), done.optimizer_name, done.optimizer_params,
            done.scheduler_name, done.scheduler_params]
answer = [facts(config) for config in given]
"""


@pytest.mark.oracle
def test_deepspeed_understands_the_same(plain: TrainingArguments, tmp_path: Path) -> None:
    filled = [config for each in ALL if (config := through_trainer(each, plain, ours=False)) is not None]
    plain_dicts = [{key: value for key, value in config.items() if key != "steps_per_print"} for config in filled]
    answers = ask_deepspeed(DEEPSPEED_PROGRAM, plain_dicts, tmp_path)
    compared = 0
    for config, theirs in zip(plain_dicts, answers, strict=True):
        try:
            resolved = resolve(config, world_size=1)
        except ConfigError:
            assert theirs is None, config
            continue
        assert theirs is not None, config
        compared += 1
        batch, zero = resolved.batch, resolved.zero
        ours = [batch.train_batch_size, batch.micro_batch_size, batch.accumulation_steps]
        ours += [resolved.gradients.clip_norm, resolved.precision.model == "bf16", zero.stage, zero.bucket_numel]
        assert ours == theirs[:7], config
        for policy, name, params in ((resolved.optimizer, *theirs[7:9]), (resolved.scheduler, *theirs[9:11])):
            assert (policy.type.lower() if policy else None) == (name.lower() if name else None)
            if policy is not None:
                assert {key: plainly(value) for key, value in policy.params.items()} == (params or {})
    assert compared >= 60


def plainly(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
