"""Resuming equals an uninterrupted run: bitwise with the same world size, closely with any other, at any stage."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.training import new_engine, train
from tests.support.ranks import run_each, run_ranks

BF16 = {"bf16": {"enabled": True}}
EIGHT: dict[str, Any] = {"optimizer": {"type": "AdamW8bit", "params": {"lr": 1e-2}}}


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


# (stage, sections) by number of ranks
SAME_WORLD: dict[int, list[tuple[int, dict[str, Any]]]] = {
    2: [(0, {}), (3, BF16), (3, {**EIGHT, **BF16})],
    3: [(2, {})],
}
MORE: dict[int, list[tuple[int, dict[str, Any]]]] = {
    1: [(2, {}), (3, {}), (3, BF16), (3, EIGHT)],
    2: [(0, BF16), (1, {}), (1, BF16), (3, {}), (0, {**EIGHT, **BF16}), (1, EIGHT)],
    3: [(2, BF16), (2, {**EIGHT, **BF16})],
    4: [(3, BF16)],
}


@pytest.mark.parametrize(
    ("world", "cases"),
    [*SAME_WORLD.items(), *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE.items())],
    ids=lambda value: None if isinstance(value, int) else len(value),
)
def test_the_same_world_continues_to_the_bit(
    world: int, cases: list[tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    runs = [(world, stage, str(tmp_path / str(number)), own) for number, (stage, own) in enumerate(cases)]
    expected = run_each(run_uninterrupted, world, runs)
    for case, found, wanted in zip(cases, run_each(run_resumed, world, runs), expected, strict=True):
        assert found == wanted, case


@pytest.mark.parametrize(
    ("kind", "stage", "sections"),
    [
        *((kind, stage, {}) for kind in ("Lion", "Lamb", "Adagrad", "SGD", "RMSprop", "RAdam") for stage in (0, 2)),
        *(("Adafactor", 0, sections) for sections in ({}, BF16)),
    ],
    ids=str,
)
def test_other_optimizers_continue_to_the_bit(kind: str, stage: int, sections: dict[str, Any], tmp_path: Path) -> None:
    params = {"lr": 1e-2, **({"momentum": 0.9} if kind in ("SGD", "RMSprop") else {})}
    own = {"optimizer": {"type": kind, "params": params}, "scheduler": {"type": None}, **sections}
    expected = run_uninterrupted(0, 1, stage, str(tmp_path), own)
    assert run_resumed(0, 1, stage, str(tmp_path), own) == expected


EVERYTHING = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3)))


def resumes_everywhere(
    source: tuple[int, int],
    targets: list[tuple[int, int]],
    root: Path,
    sections: dict[str, Any] | None = None,
    tolerance: float = 1e-5,
) -> None:
    (world, stage), own = source, sections or {}
    expected = run_ranks(run_uninterrupted, world, world, stage, str(root), own)[0]
    for other_world, other_stage in targets:
        found = run_ranks(run_resumed, other_world, other_world, other_stage, str(root), own)[0]
        assert found == pytest.approx(expected, rel=tolerance), f"{source} -> {(other_world, other_stage)}"


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


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((2, 2), (3, 3)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (((2, 2), (1, 0)), ((3, 3), (2, 1)))),
    ],
    ids=str,
)
def test_states_of_8_bits_continue_closely(source: tuple[int, int], target: tuple[int, int], tmp_path: Path) -> None:
    """Blocks are then aligned differently relative to parameters, so that states are rounded once more."""
    resumes_everywhere(source, [target], tmp_path, EIGHT, 0.02)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 3)), 2])
def test_adam_and_adam_of_8_bits_continue_each_other(stage: int, tmp_path: Path) -> None:
    """Their states have the same names, and are stored in files as fp32."""
    cases = [(2, stage, str(tmp_path / str(number)), kind) for number, kind in enumerate((EIGHT, {}))]
    expected = run_each(run_uninterrupted, 2, cases)
    swapped = [(*first[:3], second[3]) for first, second in zip(cases, cases[::-1], strict=True)]
    for resumed, losses in zip(run_each(run_resumed, 2, swapped), expected, strict=True):
        assert resumed[0] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("source", EVERYTHING, ids=str)
def test_every_world_and_stage_continues_from_every_other(source: tuple[int, int], tmp_path: Path) -> None:
    resumes_everywhere(source, EVERYTHING, tmp_path)
