"""An unmodified Trainer script gives the losses and weights of plain single-process PyTorch, in fp32 to 1e-5."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.end_to_end.parity import SCRIPT, SHORT, Case, assert_parity, outcome, run_case
from tests.support.hosts import PLAIN_TRAINER_ACCUMULATES, WHY_NOT
from tests.support.launch import launch

# Every setting occurs, at stages that treat it differently; test_offload.py evaluates in the middle.
QUICK = [
    Case(stage=0, processes=2, accumulation=4, clip=False, tied=True, steps=SHORT),
    Case(stage=1, processes=2, accumulation=1, clip=True, steps=SHORT),
    Case(stage=2, processes=1, accumulation=1, clip=False, optimizer=True, steps=SHORT),
    Case(stage=2, processes=3, accumulation=4, clip=True, optimizer=True, one_group=True, steps=SHORT),
    Case(stage=3, processes=2, accumulation=4, clip=True, tied=True, checkpointing="not_reentrant", steps=SHORT),
    Case(stage=3, processes=4, accumulation=1, clip=True, optimizer=True, scheduler=True, preset=True, steps=SHORT),
]
# Together with these, every pair of settings occurs at least once.
COVERING = [
    Case(stage=3, processes=2, accumulation=4, clip=True, tied=True),
    Case(stage=3, processes=3, accumulation=1, clip=False, evaluates=True, checkpointing="not_reentrant"),
    Case(stage=0, processes=1, accumulation=1, clip=True),
    Case(stage=0, processes=3, accumulation=4, clip=True),
    Case(stage=0, processes=4, accumulation=1, clip=False),
    Case(stage=1, processes=1, accumulation=4, clip=False),
    Case(stage=1, processes=3, accumulation=1, clip=False, tied=True),
    Case(stage=1, processes=4, accumulation=1, clip=True, optimizer=True),
    Case(stage=2, processes=2, accumulation=4, clip=True),
    Case(stage=2, processes=4, accumulation=4, clip=True, tied=True),
]
MORE_OF_STAGE_3 = [
    Case(stage=3, processes=1, accumulation=4, clip=True, tied=True, optimizer=True),
    Case(stage=3, processes=2, accumulation=1, clip=True, checkpointing="reentrant", tied=True),
    Case(stage=3, processes=2, accumulation=4, clip=True, checkpointing="not_reentrant", evaluates=True),
    Case(stage=3, processes=3, accumulation=4, clip=False, tied=True, preset=True, evaluates=True),
    Case(stage=3, processes=3, accumulation=1, clip=True, optimizer=True, one_group=True, checkpointing="reentrant"),
    Case(stage=3, processes=4, accumulation=4, clip=True, tied=True, optimizer=True, scheduler=True),
]
EVERYTHING = [
    Case(stage=stage, processes=processes, accumulation=accumulation, clip=clip)
    for stage, processes, accumulation, clip in product((0, 1, 2, 3), (1, 2, 3, 4), (1, 4), (True, False))
]
EVERYTHING += MORE_OF_STAGE_3


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in COVERING)], ids=str)
def test_trainer_equals_plain_pytorch(case: Case, tmp_path: Path) -> None:
    assert_parity(case, run_case(case, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERYTHING, ids=str)
def test_trainer_equals_plain_pytorch_everywhere(case: Case, tmp_path: Path) -> None:
    assert_parity(case, run_case(case, tmp_path))


# By default, Trainer trains under `hf-zero launch` (tests/extras/resilience/test_survival.py), and torchrun starts
# engines (tests/integration/test_error_report.py).
@pytest.mark.parametrize(
    ("processes", "stage"),
    [
        pytest.param(None, 2, id="python", marks=pytest.mark.slow),
        pytest.param(2, 2, id="torchrun2", marks=pytest.mark.slow),
        pytest.param(2, 3, id="torchrun2-stage3", marks=pytest.mark.slow),
    ],
)
def test_the_script_through_real_launchers(processes: int | None, stage: int, tmp_path: Path) -> None:
    case = Case(stage=stage, processes=processes or 1)
    finished = launch(SCRIPT, case.words(tmp_path), processes=processes).check()
    assert finished.survivors == 0
    assert_parity(case, outcome(tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(not PLAIN_TRAINER_ACCUMULATES, reason=WHY_NOT)
def test_the_harness_itself_without_an_engine(tmp_path: Path) -> None:
    case = Case(stage=None, processes=2, accumulation=4)
    words = case.words(tmp_path)
    launch(SCRIPT, words, processes=2, environment={"HF_ZERO": "0"}).check()
    assert_parity(case, outcome(tmp_path))
