"""A real Trainer on a device that runs behind the host: how often a step synchronizes with it."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import TrainerCallback

import hf_zero

hf_zero.install()

from hf_zero.integration.huggingface.late_numbers import filtered  # noqa: E402
from hf_zero.step.outcome import LateNorm, NormRule, StepOutcome, late_norm  # noqa: E402  # noqa: E402
from tests.support.late import Late, use  # noqa: E402
from tests.support.messages import heard  # noqa: E402

from .flows import BASE, clean, trainer  # noqa: E402

pytestmark = pytest.mark.lengthy

STEPS, LOGGED_EVERY = 6, 3


@pytest.fixture
def late() -> Iterator[Late]:
    clean()
    with use(Late(early=0.0)) as runtime, heard():
        assert isinstance(runtime, Late)
        yield runtime
    clean()


class Watch(TrainerCallback):
    """Records each step's synchronizations, and what Trainer passes to callbacks."""

    def __init__(self, runtime: Late) -> None:
        self.runtime, self.before = runtime, 0
        self.waits: list[int] = []
        self.logs: list[dict[str, Any]] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.before = self.runtime.num_host_waits

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.waits.append(self.runtime.num_host_waits - self.before)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


PRECISIONS = {
    "fp32": ({}, {}, 0),
    "bf16": ({"bf16": {"enabled": True}}, {"bf16": True}, 0),
    "fp16": ({"fp16": {"enabled": True, "initial_scale_power": 8}}, {"fp16": True}, 1),
}


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_waits_of_a_step(precision: str, stage: int, late: Late, tmp_path: Path) -> None:
    """After every step Trainer read the gradient norm and the overflow flag, and for every micro-batch whether the loss
    was NaN. So the host never ran ahead of its device, which defeated the engine's asynchronous design."""
    sections, arguments, most = PRECISIONS[precision]
    config = {**BASE, "zero_optimization": {"stage": stage}, "gradient_clipping": "auto", **sections}
    options = {"max_steps": STEPS, "logging_steps": LOGGED_EVERY, "report_to": "none", "learning_rate": 1e-3}
    run = trainer(tmp_path, config, **options, **arguments)
    watch = Watch(late)
    run.add_callback(watch)
    with mock.patch.object(torch, "isnan", side_effect=AssertionError("Trainer read a loss")):
        run.train()
    # Ranks agree on the order of gathers in the first step.
    assert len(watch.waits) == STEPS and max(watch.waits[1:]) <= most, watch.waits
    assert run.args.logging_nan_inf_filter is True, "as the user has it"
    norms = [logs["grad_norm"] for logs in watch.logs if "grad_norm" in logs]
    assert len(norms) == STEPS // LOGGED_EVERY and all(type(norm) is float and norm > 0 for norm in norms)
    assert json.loads(json.dumps(run.state.log_history)) == run.state.log_history


def test_waiting_or_not_logs_the_same(tmp_path: Path) -> None:
    """Losses and norms of a run that synchronizes every time, and of one that never does."""
    options: dict[str, Any] = {"max_steps": STEPS, "logging_steps": 1, "report_to": "none", "learning_rate": 1e-2}
    histories = []
    for runtime in (None, Late()):
        clean()
        with use(runtime) if runtime is not None else mock.MagicMock(), heard():
            run = trainer(tmp_path, {**BASE, "gradient_clipping": 0.5}, max_grad_norm=0.5, **options)
            run.train()
        lines = [line for line in run.state.log_history if "loss" in line]
        histories.append([(line["loss"], line["grad_norm"], line["learning_rate"]) for line in lines])
    clean()
    assert len(histories[0]) == STEPS and histories[0] == histories[1]


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2.5])
def test_the_filter_of_losses_is_trainers(loss: float, late: Late, tmp_path: Path) -> None:
    """A nonfinite loss counts as the mean of the preceding ones since the last log."""
    run = trainer(tmp_path, BASE, max_steps=1, report_to="none")
    run.train()
    run._tr_loss, run.state.global_step, run._globalstep_last_logged = torch.tensor(6.0), 5, 3
    assert float(filtered(run, torch.tensor(loss))) == (loss if math.isfinite(loss) else 2.0)
    assert run.args.logging_nan_inf_filter is False, "until the next log"
    assert float(filtered(run, torch.tensor(loss))) == pytest.approx(loss, nan_ok=True), "switched off by the user"


def outcome(squares: float) -> StepOutcome:
    return StepOutcome(torch.tensor([squares, 0.0], dtype=torch.float64), NormRule(1, 1.0, 0.0, True))


def test_a_late_norm_is_a_number() -> None:
    late = late_norm(None, outcome(9.0))
    assert isinstance(late, LateNorm) and not late.is_known
    assert not hasattr(late, "item"), "Trainer would call it"
    assert late == 3.0 and late > 2 and 2 * late + 1 == 7.0 and late**2 == 9.0 and round(late, 1) == 3.0
    assert f"{late:.2f} {late}" == "3.00 3.0" and str(late) == "3.0" and math.sqrt(late * 3) == 3.0 and bool(late)
    assert late + late_norm(outcome(4.0)) == 5.0 and max(late, 1.0) == 3.0 and {late: 1}[3.0] == 1  # type: ignore[operator,call-overload]
    assert type(copy.copy(late)) is float and math.isfinite(late) and late.is_known


def test_a_norm_that_is_known_is_a_float() -> None:
    known = outcome(9.0)
    known.read()
    assert type(late_norm(known)) is float and late_norm() is None and late_norm(None, None) is None
