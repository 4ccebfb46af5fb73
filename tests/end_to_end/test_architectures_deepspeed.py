"""The same architectures and script with real DeepSpeed: losses, norms and weights agree."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from tests.end_to_end.architecture_script import BUILT, Run, train_architecture
from tests.end_to_end.stage3 import TOLERANCE, assert_same_tensors
from tests.end_to_end.test_architectures import LONG, STAGES
from tests.support.architectures import ARCHITECTURES
from tests.support.launch import ROOT, launch
from tests.support.oracle import oracle_environment
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same_numbers

pytestmark = pytest.mark.oracle

SCRIPT = Path(__file__).parent / "architecture_script.py"
WORLD = 2
LIMIT_S = 280.0
# Cases that real DeepSpeed does not support, so that there is nothing to compare with.
BEYOND_DEEPSPEED = {"clip": "it cannot broadcast a parameter without dimensions (logit_scale)"}
BEYOND_ITS_INIT = {
    "whisper": "its zero.Init hides the shape that the encoder's positions are made for",
    "wav2vec2": "its zero.Init hides the shape that weight norm asks for",
}


def beyond(stage: int, source: str) -> dict[str, str]:
    """The unsupported cases, with reasons."""
    return {**BEYOND_DEEPSPEED, **(BEYOND_ITS_INIT if stage == 3 and source != BUILT else {})}


@functools.cache
def oracle_runs(stage: int, source: str, oracle: str, out: Path) -> Path:
    """All architectures in one launch, because starting DeepSpeed takes longer than training all of them."""
    names = [name for name in ARCHITECTURES if name not in beyond(stage, source)]
    environment = {**oracle_environment(oracle), "PYTHONPATH": str(ROOT)}
    words = [out, stage, LONG, "--source", source, "--names", *names]
    launch(SCRIPT, words, processes=WORLD, python=oracle, environment=environment, timeout_s=LIMIT_S).check()
    return out


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every architecture as a folder that from_pretrained reads."""
    folder = tmp_path_factory.mktemp("saved")
    for name, architecture in ARCHITECTURES.items():
        architecture.build().save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="session")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the oracle's results."""
    return tmp_path_factory.mktemp("theirs")


def assert_as_deepspeed(name: str, stage: int, source: str, folder: Path) -> None:
    ours = run_ranks(train_architecture, WORLD, name, stage, LONG, source)
    for rank, run in enumerate(ours):
        other = Run(**torch.load(folder / f"{name}.{rank}.pt"))
        assert_same_tensors(run.start, other.start)
        assert_same_numbers(run.losses, other.losses, TOLERANCE, "losses")
        assert_same_numbers(run.norms, other.norms, TOLERANCE, "gradient norms")
        assert_same_tensors(run.weights, other.weights)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("loaded", [False, True], ids=["built", "loaded"])
def test_equals_deepspeed(name: str, stage: int, loaded: bool, oracle: str, saved: Path, theirs: Path) -> None:
    source = str(saved) if loaded else BUILT
    if name in beyond(stage, source):
        pytest.skip(f"real DeepSpeed has no number for it: {beyond(stage, source)[name]}")
    out = theirs / f"{stage}-{loaded}"
    out.mkdir(exist_ok=True)
    assert_as_deepspeed(name, stage, source, oracle_runs(stage, source, oracle, out))
