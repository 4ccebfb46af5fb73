"""Training with expert parallelism equals training the dense model in one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.experts.training import KINDS, batches, engine_of, in_one_process, model_of
from tests.support.one_process import Difference, assert_small, differences, train
from tests.support.ranks import run_ranks

Found = dict[str, Difference]
Case = tuple[str, int, int, str]  # kind of model, stage, ranks per expert group, implementation of the experts


def _each(rank: int, world: int, cases: list[Case], steps: int, accumulated: int, more: dict[str, Any]) -> Found:
    found: Found = {}
    more = {"gradient_accumulation_steps": accumulated, **more}
    for kind, of_kind in itertools.groupby(cases, key=lambda case: case[0]):
        data = batches(world * accumulated * steps)
        plain = in_one_process(model_of(kind), data, together=world * accumulated)
        for _, stage, size, implementation in of_kind:
            engine = engine_of(model_of(kind, implementation), stage, size, rank, **more)
            name = f"{kind}, stage {stage}, {size} ranks, {implementation}"
            found[name] = differences(train(engine, data), plain.seen_by(rank, world))
            engine.destroy()
    return found


def _check(cases: list[Case], world: int, *, steps: int = 5, accumulated: int = 1, **more: Any) -> None:
    assert_small(run_ranks(_each, world, world, cases, steps, accumulated, more, timeout_s=1200))


def test_four_ranks_train_as_one_process() -> None:
    """Two groups of two ranks: experts are sharded over two ranks, everything else over four."""
    _check([("mixtral", 1, 2, "eager"), ("mixtral", 3, 2, "grouped_mm"), ("gpt-oss", 2, 2, "batched_mm")], 4)


@pytest.mark.slow  # covered by tests/products
def test_copies_of_the_states() -> None:
    """Two replicas: in each, the two ranks together hold all experts."""
    _check([("mixtral", 2, 2, "eager"), ("qwen3", 3, 2, "eager")], 4, hf_zero={"shard_group": 2})


def test_accumulation_of_micro_batches() -> None:
    cases = [(kind, stage, 2, "eager") for kind, stage in (("qwen3", 1), ("qwen3", 2), ("deepseek", 3))]
    _check(cases, 2, steps=3, accumulated=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2), (4, 4), (8, 2), (8, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_and_stages(kind: str, world: int, size: int) -> None:
    _check([(kind, stage, size, "eager") for stage in (1, 2, 3)], world, steps=20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_all_implementations(implementation: str) -> None:
    cases = [(kind, stage, 2, implementation) for kind in KINDS for stage in (1, 3)]
    _check(cases, 2, steps=4, accumulated=2)
