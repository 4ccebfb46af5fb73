"""Resuming equals an uninterrupted run: bitwise with the same world size, closely with any other, at any stage."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.training import new_engine, train
from tests.support.ranks import run_ranks

BF16 = {"bf16": {"enabled": True}}


def run_uninterrupted(rank: int, world: int, stage: int, root: str, sections: dict[str, Any]) -> list[float]:
    """Four steps, a checkpoint, five more steps; returns the losses of the latter."""
    engine = new_engine(stage, world, **sections)
    train(engine, rank, world, range(4))
    engine.save_checkpoint(root, client_state={"note": [1, "two"]})
    return train(engine, rank, world, range(4, 9))


def run_resumed(rank: int, world: int, stage: int, root: str, sections: dict[str, Any]) -> list[float]:
    """An engine with different weights loads the checkpoint and continues."""
    engine = new_engine(stage, world, seed=9, **sections)
    train(engine, rank, world, range(20, 21))
    path, client_state = engine.load_checkpoint(root)
    assert path is not None and client_state is not None and client_state["note"] == [1, "two"]
    assert (engine.global_steps, engine.global_samples) == (4, 48)
    assert engine.module.seen.tolist() == [4.0] * 3
    return train(engine, rank, world, range(4, 9))


SAME_WORLD = [(0, 2, {}), (2, 3, {}), (3, 2, BF16)]
MORE = [
    (1, 2, BF16),
    (0, 2, BF16),
    (1, 2, {}),
    (2, 3, BF16),
    (3, 2, {}),
    (3, 1, {}),
    (3, 1, BF16),
    (2, 1, {}),
    (3, 4, BF16),
]


@pytest.mark.parametrize(
    ("stage", "world", "sections"),
    [*SAME_WORLD, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda value: ("bf16" if value else "fp32") if isinstance(value, dict) else None,
)
def test_the_same_world_continues_to_the_bit(stage: int, world: int, sections: dict[str, Any], tmp_path: Path) -> None:
    arguments = (world, world, stage, str(tmp_path), sections)
    expected = run_ranks(run_uninterrupted, *arguments)
    assert run_ranks(run_resumed, *arguments) == expected


EVERYTHING = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3)))


def resumes_everywhere(source: tuple[int, int], targets: list[tuple[int, int]], root: Path) -> None:
    world, stage = source
    expected = run_ranks(run_uninterrupted, world, world, stage, str(root), {})[0]
    for other_world, other_stage in targets:
        found = run_ranks(run_resumed, other_world, other_world, other_stage, str(root), {})[0]
        assert found == pytest.approx(expected, rel=1e-5), f"{source} -> {(other_world, other_stage)}"


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ((2, 2), [(1, 0), (3, 3)]),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (((3, 3), [(2, 1)]), ((1, 0), [(2, 2)]))),
    ],
    ids=str,
)
def test_another_world_or_stage_continues(
    source: tuple[int, int], targets: list[tuple[int, int]], tmp_path: Path
) -> None:
    resumes_everywhere(source, targets, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", EVERYTHING, ids=str)
def test_every_world_and_stage_continues_from_every_other(source: tuple[int, int], tmp_path: Path) -> None:
    resumes_everywhere(source, EVERYTHING, tmp_path)
