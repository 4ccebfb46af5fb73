"""Ranks that hold parts of matrices train as one plain process does: losses, norms, weights."""

from __future__ import annotations

import itertools

import pytest

from tests.support.ranks import run_ranks
from tests.tensor.training import compare

TOLERANCE = 1e-5
Found = dict[str, tuple[float, ...]]


def _all(rank: int, tensor: int, world: int, kinds: tuple[str, ...], stages: tuple[int, ...], steps: int) -> Found:
    return {
        f"{kind}, stage {stage}": compare(rank, kind, stage, tensor, world=world, steps=steps)
        for kind, stage in itertools.product(kinds, stages)
    }


def _check(tensor: int, world: int, kinds: tuple[str, ...], stages: tuple[int, ...], steps: int) -> None:
    for found in run_ranks(_all, world, tensor, world, kinds, stages, steps):
        assert {name: worst for name, worst in found.items() if max(worst) > TOLERANCE} == {}


def test_two_ranks_train_as_one_process() -> None:
    _check(2, 2, ("llama", "gpt2"), (0, 1, 2), 4)


def test_four_ranks_train_as_one_process() -> None:
    _check(2, 4, ("uneven", "mixtral"), (2,), 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mixtral", "phi3", "uneven"])
@pytest.mark.parametrize(("tensor", "world"), [(2, 2), (4, 4), (2, 4)])
def test_every_kind_trains_as_one_process(kind: str, tensor: int, world: int) -> None:
    _check(tensor, world, (kind,), (0, 1, 2), 20)
