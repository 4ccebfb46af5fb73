"""Accelerator.prepare with ds.json through hf_zero: optimizer and scheduler objects, autos, conflicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

import hf_zero

hf_zero.install()

from hf_zero import ConfigError, DummyOptim, DummyScheduler  # noqa: E402
from tests.support.messages import heard  # noqa: E402

from .flows import ADAMW, WARMUP_DECAY, accelerator, loader, one_step, write  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def fresh(one_rank: None) -> Iterator[None]:
    with heard() as said:
        yield
    assert not [line for line in said if "steps aside" in line]


def prepared(given: Any, optimizer: str, scheduler: str | None, **options: Any) -> tuple[Any, Any]:
    """The engine and the scheduler that `prepare` creates from real or dummy objects."""
    return prepare(accelerator(given, **options), optimizer, scheduler)


def prepare(acc: Any, optimizer: str, scheduler: str | None) -> tuple[Any, Any]:
    model = torch.nn.Linear(8, 8)
    optim: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if optimizer == "dummy":
        optim = DummyOptim(model.parameters(), lr=0.02, weight_decay=0.3)
    schedule: Any = None
    if scheduler == "real":
        base = optim if optimizer == "real" else torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = LambdaLR(base, lambda step: 0.5)
    elif scheduler == "dummy":
        schedule = DummyScheduler(optim, total_num_steps=10, warmup_num_steps=3)
    elif scheduler == "callable":
        schedule = DummyScheduler(optim, lr_scheduler_callable=lambda base: LambdaLR(base, lambda step: 0.5))
    objects = [thing for thing in (model, optim, loader(), schedule) if thing is not None]
    result = acc.prepare(*objects)
    return result[0], result[3] if schedule is not None else None


# Sections and objects


def test_both_sections_with_both_dummies() -> None:
    engine, _ = prepared(one_step(optimizer=ADAMW, scheduler=WARMUP_DECAY), "dummy", "dummy")
    (group,) = engine.optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.3, (0.9, 0.999), 1e-8)
    assert engine.lr_scheduler.max_lrs == [0.02] and engine.config["scheduler"]["params"]["total_num_steps"] == 10


def test_no_section_with_real_objects() -> None:
    engine, schedule = prepared(one_step(), "real", "real")
    assert type(engine.optimizer.optimizer) is torch.optim.SGD and engine.lr_scheduler is None
    assert type(schedule.scheduler) is LambdaLR
    assert engine.config["zero_allow_untested_optimizer"] is True


def test_a_function_that_makes_the_schedule_of_a_real_optimizer() -> None:
    """accelerate calls it for an optimizer of the config alone; the placeholder had no step."""
    engine, schedule = prepared(one_step(), "real", "callable")
    assert type(schedule.scheduler) is LambdaLR and engine.lr_scheduler is None
    assert engine.optimizer.param_groups[0]["lr"] == 0.05
    assert schedule.scheduler.optimizer.param_groups is engine.optimizer.param_groups


def test_scheduler_section_with_a_real_optimizer() -> None:
    engine, _ = prepared(one_step(scheduler=WARMUP_DECAY), "real", "dummy")
    assert type(engine.optimizer.optimizer) is torch.optim.SGD
    assert type(engine.lr_scheduler).__name__ == "WarmupDecayLR" and engine.lr_scheduler.max_lrs == [0.1]


def test_a_dummy_optimizer_with_a_schedule_made_later() -> None:
    engine, _ = prepared(one_step(optimizer=ADAMW), "dummy", "callable")
    assert type(engine.lr_scheduler) is LambdaLR
    assert engine.lr_scheduler.optimizer is engine.optimizer.optimizer


BOTH = {"optimizer": ADAMW, "scheduler": WARMUP_DECAY}
OPTIMIZER_TWICE = "You cannot specify an optimizer in the config file and in the code"
SCHEDULER_TWICE = "You cannot specify a scheduler in the config file and in the code at the same time."
# sections, optimizer, scheduler, the first words of accelerate's own error, words of ours
CLASHES: list[tuple[dict[str, Any], str, str | None, str, tuple[str, ...]]] = [
    (
        {"optimizer": ADAMW}, "real", None, OPTIMIZER_TWICE,
        ("optimizer = 'AdamW'  [{path}:", "given to prepare() = 'SGD'  [the script]", "`accelerate.utils.DummyOptim`"),
    ),
    (
        {}, "dummy", None, "You cannot create a `DummyOptim` without specifying an optimizer in the config file.",
        ("cannot create a `DummyOptim` without an optimizer section", "AdamW"),
    ),
    (BOTH, "dummy", "real", SCHEDULER_TWICE, ()),
    (
        {"optimizer": ADAMW}, "dummy", "real", "You can only specify `accelerate.utils.DummyScheduler` in the code",
        ("only `accelerate.utils.DummyScheduler` can go with `accelerate.utils.DummyOptim`", "lr_scheduler_callable"),
    ),
    (
        {"scheduler": WARMUP_DECAY}, "real", "real", SCHEDULER_TWICE,
        ("scheduler = 'WarmupDecayLR'", "given to prepare() = 'LambdaLR'", "remove the section scheduler from"),
    ),
    (
        {}, "real", "dummy", "Either specify a scheduler in the config file or pass in the `lr_scheduler_callable`",
        ("there is none",),
    ),
    (BOTH | {"zero_optimisation": 1}, "real", "real", OPTIMIZER_TWICE, ("(3 problems)",)),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "optimizer", "scheduler", "first", "words"), CLASHES)
def test_what_prepare_cannot_use_is_refused_in_accelerates_words_first(
    sections: dict[str, Any], optimizer: str, scheduler: str | None, first: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    """A search for accelerate's message found nothing, because hf_zero's was worded differently."""
    path = write(tmp_path, one_step(**sections))
    acc = accelerator(str(path))
    before = dict(acc.deepspeed_plugin.deepspeed_config)
    with pytest.raises(ConfigError) as caught:
        prepare(acc, optimizer, scheduler)
    message = str(caught.value)
    assert message.startswith(first) and "\nhf_zero found in this config (" in message
    for each in words:
        assert each.format(path=path) in message, message
    # As after accelerate's own check, an engine can be made with the same objects, once they are corrected.
    assert dict(acc.deepspeed_plugin.deepspeed_config) == before
    assert deepspeed.initialize is hf_zero.initialize


# Autos


def test_unfilled_autos_are_no_error() -> None:
    unfilled = {"stage": 2, "overlap_comm": "auto", "allgather_bucket_size": "auto", "reduce_bucket_size": "auto"}
    types = {"keep_in_fp32_modules": "auto"}
    given = one_step(zero_optimization=unfilled, fp16={"enabled": False, "loss_scale": "auto"}, data_types=types)
    engine, _ = prepared(given, "real", None)
    # For a model without config the size is computed from its matrices, here 8.
    assert engine.config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 64}


def test_a_ratio_of_auto_is_a_value() -> None:
    offload = {"device": "cpu", "ratio": "auto"}
    config = one_step(optimizer=ADAMW, zero_optimization={"stage": 1, "offload_optimizer": offload})
    engine, _ = prepared(config, "dummy", None)
    assert engine.settings.resolved.zero.offload_optimizer.ratio == "auto"


def test_betas_and_eps_come_from_the_dummy_optimizer() -> None:
    acc = accelerator(one_step(optimizer=ADAMW))
    model = torch.nn.Linear(8, 8)
    engine, _, _ = acc.prepare(model, DummyOptim(model.parameters(), betas=(0.8, 0.9), eps=1e-5), loader())
    (group,) = engine.optimizer.param_groups
    assert (tuple(group["betas"]), group["eps"], group["lr"]) == ((0.8, 0.9), 1e-5, 0.001)


@pytest.mark.parametrize("form", ["generators", "filters", "one parameter"])
def test_the_groups_of_a_dummy_optimizer_may_be_generators(form: str) -> None:
    """The search for an already prepared model exhausted the generators, which ended in "no trainable parameter". If
    one group had a list, the other groups were silently not trained."""
    acc = accelerator(one_step(optimizer=ADAMW))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False))
    rest, last = list(model[0].parameters()), model[1].weight
    second: Any = {"generators": (each for each in [last]), "filters": filter(torch.is_tensor, [last])}.get(form, last)
    optimizer = DummyOptim([{"params": rest}, {"params": second, "weight_decay": 0.5}], lr=0.02)
    before = last.detach().clone()
    engine, wrapped, _ = acc.prepare(model, optimizer, loader())
    assert [group["weight_decay"] for group in wrapped.param_groups] == [0, 0.5]
    acc.backward(engine(torch.ones(2, 8)).sum())
    wrapped.step()
    assert not torch.equal(last, before)


def test_batch_sizes_come_from_loaders_prepared_before() -> None:
    acc = accelerator(one_step(), gradient_accumulation_steps=1)
    acc.prepare(loader(4))
    model = torch.nn.Linear(8, 8)
    engine, _ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert engine.train_micro_batch_size_per_gpu() == 4


def test_no_loader_at_all_says_what_to_give() -> None:
    acc = accelerator(one_step())
    model = torch.nn.Linear(8, 8)
    with pytest.raises(ConfigError, match="from the dataloader given to prepare") as caught:
        acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "train_micro_batch_size_per_gpu" in str(caught.value)


def test_a_refused_call_leaves_nothing_behind() -> None:
    """In a notebook `prepare` was refused; the next call without loaders took its batch size from the refused ones."""
    acc, model = accelerator(one_step(optimizer=ADAMW)), torch.nn.Linear(8, 8)
    acc.prepare(loader(2))
    with pytest.raises(ConfigError):
        acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(4))
    assert len(acc._dataloaders) == 1 and not acc._models and not acc._optimizers
    engine, _ = acc.prepare(model, DummyOptim(model.parameters()))
    assert engine.train_micro_batch_size_per_gpu() == 2


def test_a_loader_without_batch_size_says_what_to_give() -> None:
    acc = accelerator(one_step())
    model = torch.nn.Linear(8, 8)
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu"):
        acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(None))


@pytest.mark.parametrize(("smallest", "expected"), [(True, 2), (False, 4)])
def test_the_smallest_or_the_largest_batch(smallest: bool, expected: int) -> None:
    acc = accelerator(one_step())
    acc.deepspeed_plugin.is_train_batch_min = smallest
    model = torch.nn.Linear(8, 8)
    engine, *_ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(2), loader(4))
    assert engine.train_micro_batch_size_per_gpu() == expected


def test_an_unknown_total_says_where_to_give_it() -> None:
    acc = accelerator(one_step(optimizer=ADAMW, scheduler=WARMUP_DECAY))
    model = torch.nn.Linear(8, 8)
    optimizer = DummyOptim(model.parameters())
    with pytest.raises(ConfigError, match="the number of updates is unknown") as caught:
        acc.prepare(model, optimizer, loader(), DummyScheduler(optimizer))
    assert "DummyScheduler(optimizer, total_num_steps=...)" in str(caught.value)


def test_an_unpublished_hidden_size_is_found() -> None:
    model = torch.nn.Linear(8, 8)
    model.config = SimpleNamespace(text_config=SimpleNamespace(hidden_size=5))  # type: ignore[assignment]
    acc = accelerator(one_step(zero_optimization={"stage": 1, "reduce_bucket_size": "auto"}))
    engine, *_ = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader())
    assert engine.config["zero_optimization"]["reduce_bucket_size"] == 64


def test_accumulation_in_the_file_wins_over_the_accelerator() -> None:
    engine, _ = prepared({**one_step(), "gradient_accumulation_steps": 4}, "real", None, gradient_accumulation_steps=2)
    assert engine.gradient_accumulation_steps() == 4


def test_accumulation_of_the_accelerator_fills_an_auto() -> None:
    given = {**one_step(), "gradient_accumulation_steps": "auto"}
    engine, _ = prepared(given, "real", None, gradient_accumulation_steps=2)
    assert engine.get_batch_info() == (4, 2, 2)


def test_accumulation_of_the_accelerator_holds_where_the_file_says_nothing() -> None:
    given = {key: value for key, value in one_step().items() if key != "gradient_accumulation_steps"}
    engine, _ = prepared(given, "real", None, gradient_accumulation_steps=2)
    assert engine.get_batch_info() == (4, 2, 2)


def test_the_stand_in_states_what_the_file_leaves_out() -> None:
    engine, _ = prepared(one_step(optimizer={"type": "AdamW"}), "dummy", None)
    assert engine.optimizer.param_groups[0]["lr"] == 0.02
    assert engine.optimizer.param_groups[0]["weight_decay"] == 0.3


# Conflicts


def test_a_precision_flag_against_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, one_step(bf16={"enabled": True}))
    with pytest.raises(ConfigError) as caught:
        accelerator(str(path), mixed_precision="fp16")
    message = str(caught.value)
    assert message.startswith("`--mixed_precision` arg cannot be set to `fp16` when `bf16` is set")
    assert f"bf16.enabled = true  [{path}:" in message
    assert "but:  mixed_precision = 'fp16'  [Accelerator(mixed_precision)]" in message


def test_a_precision_flag_that_the_file_switches_off_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with heard() as said:
        accelerator(one_step(bf16={"enabled": False}), mixed_precision="bf16")
    assert any("the config decides, and training is not in bf16" in line for line in said)


def test_a_client_optimizer_under_offload_stays_itself() -> None:
    import accelerate.accelerator as upstream

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert upstream.map_pytorch_optim_to_deepspeed(optimizer) is optimizer
    engine, _ = prepared(one_step(zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}), "real", None)
    assert type(engine.optimizer.optimizer) is torch.optim.SGD
