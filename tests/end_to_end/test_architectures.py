"""Two dozen architectures of transformers give the losses, norms and weights of plain PyTorch on the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.end_to_end.architecture_script import EPS, FROM_CONFIG, LEARNING_RATE, ROWS, Run, train_architecture
from tests.end_to_end.stage3 import TOLERANCE, assert_same_tensors
from tests.support.architectures import ARCHITECTURES
from tests.support.ranks import run_each, run_ranks
from tests.support.reference import Recipe, Trace, assert_same_numbers, train

NORM_TOLERANCE = 1e-4  # plain PyTorch in fp32 is itself off by 3e-5 from fp64 here, with gemma3
SHORT, LONG = 4, 20
STAGES = [2, 3]
QUICK_AT_STAGE_2 = ["mixtral", "wav2vec2"]


def reference(model: nn.Module, name: str, steps: int) -> Trace:
    """Plain PyTorch: one process, the whole batch at once."""
    architecture = ARCHITECTURES[name]
    batches = [[batch] for batch in architecture.batches(steps, ROWS)]
    return train(model, batches, Recipe(learning_rate=LEARNING_RATE, eps=EPS), architecture.loss)


@cache
def expected(name: str, steps: int) -> Trace:
    """The reference from scratch."""
    return reference(ARCHITECTURES[name].build(), name, steps)


def assert_parity(runs: list[Run], trace: Trace) -> None:
    """Losses within 1e-5, norms almost so, and every parameter on every rank."""
    mean_losses = [sum(losses) / len(runs) for losses in zip(*(run.losses for run in runs), strict=True)]
    assert_same_numbers(mean_losses, trace.losses, TOLERANCE, "losses")
    for run in runs:
        assert_same_numbers(run.norms, trace.norms, NORM_TOLERANCE, "gradient norms")
        assert_same_tensors(run.weights, {key: trace.weights[key] for key in run.weights})


def assert_begins_as(runs: list[Run], model: nn.Module) -> None:
    """Every parameter on every rank bitwise equals the model's."""
    begun = dict(model.named_parameters())
    for run in runs:
        assert run.start.keys() == begun.keys()
        for key, value in begun.items():
            assert torch.equal(run.start[key], value), f"{key} does not start as it was built or saved"


def run_cases(names: Sequence[str], stage: int, world: int, steps: int) -> None:
    """From scratch, one after the other."""
    for name, runs in zip(names, run_each(train_architecture, world, [(n, stage, steps) for n in names]), strict=True):
        assert_begins_as(runs, ARCHITECTURES[name].build())
        assert_parity(runs, expected(name, steps))


# The slow tests run these, too; others have their layers, ties and experts.
ALIKE = ("qwen3", "gpt-neox", "opt", "bart", "roberta", "clip", "mamba2")
NAMES = [name for name in ARCHITECTURES if name not in ALIKE]
TOGETHER = [NAMES[start : start + 6] for start in range(0, len(NAMES), 6)]


@pytest.mark.parametrize("names", TOGETHER, ids="-".join)
def test_stage_3_equals_plain_pytorch(names: list[str]) -> None:
    run_cases(names, stage=3, world=2, steps=SHORT)


def test_stage_2_equals_plain_pytorch() -> None:
    run_cases(QUICK_AT_STAGE_2, stage=2, world=2, steps=SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_equals_plain_pytorch_everywhere(name: str, stage: int, world: int) -> None:
    run_cases([name], stage, world, LONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("stage", STAGES)
def test_from_pretrained_equals_plain_pytorch(name: str, stage: int, tmp_path: Path) -> None:
    ARCHITECTURES[name].build().save_pretrained(tmp_path / name)
    runs = run_ranks(train_architecture, 2, name, stage, LONG, str(tmp_path))
    model = ARCHITECTURES[name].build()
    assert_begins_as(runs, model)
    for key, parameter in model.named_parameters():
        # Loading into plain weights resets requires_grad: the positions of Whisper become trainable.
        assert parameter.requires_grad or stage < 3 or key not in runs[0].trained, f"{key} was frozen"
        parameter.requires_grad_(key in runs[0].trained)
    assert_parity(runs, reference(model, name, LONG))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("stage", STAGES)
def test_from_config_equals_plain_pytorch(name: str, stage: int) -> None:
    """Ranks with different random weights train rank 0's model."""
    runs = run_ranks(train_architecture, 2, name, stage, LONG, FROM_CONFIG)
    model = ARCHITECTURES[name].build()
    spread = {key: value.std() for key, value in model.named_parameters() if value.numel() > 500}
    model.load_state_dict(runs[0].start, strict=False)
    assert_begins_as(runs, model)
    for key, std in spread.items():  # initialised as by this architecture, not with torch's defaults
        assert 0.5 * std <= runs[0].start[key].std() <= 2 * std, key
    assert_parity(runs, reference(model, name, LONG))
