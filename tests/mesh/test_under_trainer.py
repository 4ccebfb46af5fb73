"""Tensor x sequence parallelism with an unmodified Trainer and Accelerator."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.mesh.under_trainer import by_trainer, compared, other_models
from tests.support.launch import ROOT, launch
from tests.support.one_process import assert_small
from tests.support.ranks import run_ranks
from tests.tensor.models import model_of


def _four_ranks(rank: int, folder: str, stages: Collection[int]) -> dict[str, float]:
    return compared(Path(folder), stages)


def test_four_ranks_train_as_one_process(tmp_path: Path) -> None:
    """A user wanted `autotp_size` with `sp_size`: accelerate takes neighbours for the ranks that share a sequence, but
    deals the same batches to neighbours under tensor parallelism. Sequences are now shared across tensor groups."""
    assert_small(run_ranks(_four_ranks, 4, str(tmp_path), (2,), init=False))


@pytest.mark.slow
def test_four_ranks_of_a_launcher_at_every_stage(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(ROOT)}
    launch(
        ROOT / "tests/mesh/under_trainer.py", [tmp_path], processes=4, environment=environment, timeout_s=300
    ).check()
    assert_small(json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(4))


def _eight_ranks(rank: int, folder: str, stage: int) -> dict[str, float]:
    return by_trainer(Path(folder), stage, model_of("llama"), data_ranks=2)


@pytest.mark.slow
def test_two_data_ranks_of_two_parts_of_sequences_and_matrices(tmp_path: Path) -> None:
    assert_small(run_ranks(_eight_ranks, 8, str(tmp_path), 3, init=False, timeout_s=240))


def _others(rank: int, folder: str) -> dict[str, float]:
    return other_models(Path(folder), [("lora", 2), ("lora", 3), ("gpt2", 1), ("mixtral", 2), ("qwen3_next", 3)])


@pytest.mark.slow
def test_adapters_and_other_models(tmp_path: Path) -> None:
    """Fused matrices without a plan, experts, and linear attention, which accelerate registers before it is cut."""
    assert_small(run_ranks(_others, 4, str(tmp_path), init=False, timeout_s=240))
