"""Schedules of difficulty: worked vectors, the formulas at 500 points, DeepSpeed's own class."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.config import ConfigError
from hf_zero.extras.data_efficiency.difficulty import CurriculumScheduler, Difficulty
from hf_zero.extras.data_efficiency.section import DifficultyPolicy
from tests.config.deepspeed_answers import ask_deepspeed
from tests.support.requirements import requires


def root(low: int, high: int, total: int, multiple: int, degree: int = 1) -> DifficultyPolicy:
    return DifficultyPolicy(
        schedule="fixed_root", minimum=low, maximum=high, total_steps=total, multiple=multiple, degree=degree
    )


WORKED: list[tuple[DifficultyPolicy, dict[int, int]]] = [
    (
        root(8, 1024, 15000, 8),
        {1: 8, 118: 8, 119: 16, 500: 40, 1000: 72, 5000: 344, 7500: 512, 14999: 1016, 15000: 1024, 99999: 1024},
    ),
    (root(8, 1024, 15000, 8, 2), {1: 16, 100: 88, 500: 192, 1000: 264, 3750: 512, 7500: 720}),
    (root(1, 100, 110000, 1, 2), {12: 2, 1000: 10, 27500: 50}),
    (root(8, 64, 8, 16), dict(enumerate([16, 16, 16, 32, 32, 48, 48, 64], 1))),
    (root(64, 100, 4, 8), {1: 72, 2: 80, 3: 88, 4: 96, 5: 100}),
    (
        DifficultyPolicy(schedule="fixed_discrete", minimum=1, maximum=3, difficulties=(1, 2, 3), last_steps=(5, 10)),
        {1: 1, 5: 1, 6: 2, 10: 2, 11: 3, 99: 3},
    ),
]


@pytest.mark.parametrize("case", range(len(WORKED)))
def test_worked_vectors(case: int) -> None:
    policy, expected = WORKED[case]
    assert {step: Difficulty(policy).at(step) for step in expected} == expected


@settings(max_examples=500, deadline=None)
@given(
    low=st.integers(1, 300),
    more=st.integers(0, 3000),
    total=st.integers(1, 50000),
    multiple=st.integers(1, 64),
    degree=st.integers(1, 4),
    step=st.integers(1, 60000),
)
def test_the_formula_at_500_points(low: int, more: int, total: int, multiple: int, degree: int, step: int) -> None:
    high = low + more
    value = math.floor((step / total) ** (1 / degree) * (high - low) + low)
    value = value // multiple * multiple
    expected = min(high, max(value, math.ceil(low / multiple) * multiple))
    assert Difficulty(root(low, high, total, multiple, degree)).at(step) == expected


QUESTIONS: list[dict[str, Any]] = [
    {
        "min_difficulty": 8,
        "max_difficulty": 1024,
        "schedule_type": kind,
        "schedule_config": {"total_curriculum_step": 700, "difficulty_step": 8, "root_degree": 2},
    }
    for kind in ("fixed_linear", "fixed_root")
] + [
    {
        "min_difficulty": 1,
        "max_difficulty": 5,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [1, 5, 2], "max_step": [100, 300]},
    }
]
STEPS = list(range(1, 1001, 2))
_PROGRAM = """
from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
answer = []
for config in given["configs"]:
    scheduler = CurriculumScheduler(config)
    answer.append([scheduler.update_difficulty(step) for step in given["steps"]])
"""


@pytest.mark.oracle
@requires(oracle=True)
def test_deepspeeds_own_scheduler_at_500_points(tmp_path: Path) -> None:
    theirs = ask_deepspeed(_PROGRAM, {"configs": QUESTIONS, "steps": STEPS}, tmp_path)
    for config, expected in zip(QUESTIONS, theirs):
        scheduler = CurriculumScheduler(config)
        assert [scheduler.update_difficulty(step) for step in STEPS] == expected


def test_custom_schedules_and_what_is_missing() -> None:
    config = {"min_difficulty": 2, "max_difficulty": 9, "schedule_type": "custom"}
    scheduler = CurriculumScheduler(config)
    with pytest.raises(RuntimeError, match="needs its function"):
        scheduler.update_difficulty(1)
    scheduler.set_custom_get_difficulty(lambda step: step * 3)
    assert [scheduler.update_difficulty(step) for step in (1, 2, 3, 1)] == [3, 6, 9, 9]
    again = CurriculumScheduler(config)
    again.set_state(scheduler.get_state())
    assert again.get_current_difficulty() == 9
    with pytest.raises(ConfigError, match="schedule_type"):
        CurriculumScheduler({"min_difficulty": 2, "max_difficulty": 9})
    assert Difficulty(root(1, 4, 4, 1)).at(2) == 2
