"""Sequence parallelism gives the losses and weights of one plain process, for every stage and model."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.sequence.training import compare, packed, padded
from tests.support.one_process import Difference, assert_small
from tests.support.ranks import run_ranks

Found = dict[str, Difference]
ONE_KEY_HEAD = "qwen2, one key head"
# model, stage, special settings
SELECTION: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("llama", 0, {}),
    ("llama", 1, {"accumulation": 3, "steps": 2}),
    ("llama", 2, {"length": 11}),  # padded by the adapter
    ("llama", 3, {"attention": "eager"}),
    (ONE_KEY_HEAD, 2, {"change": packed}),
    (ONE_KEY_HEAD, 3, {"change": packed, "attention": "eager"}),
    (ONE_KEY_HEAD, 1, {"change": lambda batch: padded(batch, left=7)}),
    ("gpt2", 3, {"change": lambda batch: padded(batch, right=7)}),
    ("gpt2", 2, {"change": lambda batch: padded(batch, left=2, right=1), "attention": "eager"}),
    ("mixtral", 3, {}),
    ("mistral", 1, {}),
    ("mistral", 2, {"attention": "eager", "change": lambda batch: padded(batch, left=3)}),
)


def _selection(rank: int) -> Found:
    return {
        f"{kind}, stage {stage}, {[*more]}": compare(rank, kind, stage, 2, world=2, **{"steps": 3, **more})
        for kind, stage, more in SELECTION
    }


def test_two_ranks_train_as_one_process() -> None:
    assert_small(run_ranks(_selection, 2))


def _several_groups(rank: int) -> Found:
    return {
        "2 x 2": compare(rank, ONE_KEY_HEAD, 2, 2, steps=2, world=4, change=packed),
        "1 x 4": compare(rank, "llama", 3, 4, steps=1, world=4),
    }


def test_four_ranks_train_as_one_process() -> None:
    assert_small(run_ranks(_several_groups, 4))


def _sweep(rank: int, size: int, world: int, kind: str) -> Found:
    cases = itertools.product(range(4), (1, 3))
    return {
        f"stage {stage}, accumulation {accumulation}": compare(
            rank, kind, stage, size, steps=20 if accumulation == 1 else 4, accumulation=accumulation, world=world
        )
        for stage, accumulation in cases
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["llama", ONE_KEY_HEAD, "gpt2", "mixtral"])
@pytest.mark.parametrize(("size", "world"), [(2, 2), (2, 4), (4, 4), (4, 8)])
def test_sweep(size: int, world: int, kind: str) -> None:
    assert_small(run_ranks(_sweep, world, size, world, kind, timeout_s=900))
