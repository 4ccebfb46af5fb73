"""A tiny Llama as a config.json, plans for it, what a plan says, and trials that are not run."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import LlamaConfig

from hf_zero.extras.autotuning import measure as measuring
from hf_zero.extras.autotuning.tuning import Experiment, Result
from hf_zero.layout.memory import gradient_sizes
from hf_zero.planning import memory
from hf_zero.planning.candidates import Training
from hf_zero.planning.choose import RankedPlans, plan
from hf_zero.planning.machine import hardware
from hf_zero.planning.memory import Setting
from hf_zero.planning.model import PlannedModel, load_model
from hf_zero.planning.show import show
from hf_zero.planning.trace import ModelTrace


def config_folder(folder: Path, **changes: Any) -> str:
    """Creates a folder with config.json."""
    values = {
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_cache": False,
        "architectures": ["LlamaForCausalLM"],
    }
    LlamaConfig(**{**values, **changes}).save_pretrained(folder)
    return str(folder)


@cache
def of_size(source: str, precision: str = "bf16") -> PlannedModel:
    """A Llama of this size, the same for all tests, which then share its traces."""
    return load_model(source, precision)


def planned(
    source: str, training: Training | None = None, model: PlannedModel | None = None, **machine: Any
) -> RankedPlans:
    """The plan for a model, by default `of_size`, on given machines."""
    given = {"gpu": "h100", "gpus_per_node": 8, "host_memory": "1T", **machine}
    training = training or Training(length=64)
    return plan(model or of_size(source, training.precision), hardware(given), training)


def shown(plan: RankedPlans, **options: bool) -> str:
    """The command's output, with each paragraph on one line."""
    page = io.StringIO()
    show(plan, console=Console(file=page, width=400), **options)
    return page.getvalue()


def states_of(model: PlannedModel, setting: Setting, traced: ModelTrace) -> dict[str, int]:
    """Bytes of a rank's states by kind; reduced gradients without those that wait for the rest of their bucket."""
    found = memory.rank_memory(model, setting, traced)
    kinds = ("parameters", "optimizer")
    sizes = {kind: found.device.get(kind, 0) + found.disk.get(kind, 0) for kind in kinds}
    layout, units = memory._layouts(model, setting)
    return sizes | {"gradients": gradient_sizes(memory.rank_sizes(model, setting, layout, units)).total()}


def imitate_trials(
    monkeypatch: pytest.MonkeyPatch, rate: Callable[[int], float] = lambda number: 2.0
) -> list[Experiment]:
    """Runs no trial; returns the list of those that are asked for.

    Args:
        rate: the throughput of a trial by its number, from 1; 0: it runs out of memory.
    """
    asked: list[Experiment] = []

    def run(experiment: Experiment, folder: Path, **_: Any) -> Result:
        asked.append(experiment)
        found = rate(len(asked))
        return Result(experiment, "ok" if found else "out of memory", {"throughput": found} if found else {})

    monkeypatch.setattr(measuring, "run_experiment", run)
    return asked
