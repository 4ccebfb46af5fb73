"""Errors start with the messages of transformers and accelerate, which users search for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero

hf_zero.install()

from torch.optim.lr_scheduler import LambdaLR  # noqa: E402

from hf_zero import ConfigError, DummyOptim, DummyScheduler  # noqa: E402

from .flows import ADAMW, BASE, WARMUP_DECAY, accelerator, arguments, loader, one_step  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_rank")


def refusal(call: Callable[..., object], *given: Any, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call(*given, **options)
    return caught.value


# sections, optimizer, scheduler, the first words of accelerate's own error
CLASHES = [
    ({"optimizer": ADAMW}, "real", None, "You cannot specify an optimizer in the config file and in the code"),
    ({}, "dummy", None, "You cannot create a `DummyOptim` without specifying an optimizer in the config file."),
    (
        {"optimizer": ADAMW, "scheduler": WARMUP_DECAY},
        "dummy",
        "real",
        "You cannot specify a scheduler in the config file and in the code at the same time.",
    ),
    ({}, "real", "dummy", "Either specify a scheduler in the config file or pass in the `lr_scheduler_callable`"),
]


@pytest.mark.parametrize(("sections", "optimizer", "scheduler", "words"), CLASHES)
def test_prepare_begins_with_the_words_of_accelerate(
    sections: dict[str, Any], optimizer: str, scheduler: str | None, words: str
) -> None:
    """A search for accelerate's message found nothing, because hf_zero's was worded differently."""
    acc, model = accelerator(one_step(**sections)), torch.nn.Linear(8, 8)
    real = torch.optim.SGD(model.parameters(), lr=0.1)
    optim: Any = real if optimizer == "real" else DummyOptim(model.parameters())
    schedule: list[Any] = []
    if scheduler is not None:
        made: Any = LambdaLR(real, lambda step: 1.0) if scheduler == "real" else DummyScheduler(optim)
        schedule.append(made)
    before = dict(acc.deepspeed_plugin.deepspeed_config)
    message = str(refusal(acc.prepare, model, optim, loader(), *schedule))
    assert message.startswith(words) and "\nhf_zero found in this config (" in message
    # accelerate's check has no side effects: the engine can be created from the same objects, once corrected.
    assert dict(acc.deepspeed_plugin.deepspeed_config) == before
    import deepspeed

    assert deepspeed.initialize is hf_zero.initialize


def test_a_contradiction_begins_with_the_words_of_transformers(tmp_path: Path) -> None:
    given = {**BASE, "gradient_accumulation_steps": 3, "gradient_clipping": 0.25, "bf16": {"enabled": "auto"}}
    error = refusal(arguments, tmp_path, given, gradient_accumulation_steps=2, max_grad_norm=1.0)
    first, _, rest = str(error).partition("\nhf_zero found in this config (2 problems):\n")
    assert first.startswith("Please correct the following DeepSpeed config values that mismatch TrainingArguments")
    assert "- ds gradient_accumulation_steps=3 vs hf gradient_accumulation_steps=2" in first
    assert error.__suppress_context__  # one error, not "during handling of the above exception, another"
    assert "1. gradient_accumulation_steps = 3" in rest and "but:  max_grad_norm = 1.0" in rest


def test_what_only_hf_zero_finds_stands_alone(tmp_path: Path) -> None:
    error = refusal(arguments, tmp_path, {**BASE, "autotuning": {"enabled": True, "mp_size": 2}})
    assert str(error).startswith("this config cannot be used (1 problem):")


def test_a_precision_flag_begins_with_the_words_of_accelerate() -> None:
    error = refusal(accelerator, one_step(bf16={"enabled": True}), mixed_precision="fp16")
    assert str(error).startswith("`--mixed_precision` arg cannot be set to `fp16` when `bf16` is set")
