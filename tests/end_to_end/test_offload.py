"""An unmodified Trainer script with offload gives the results of plain PyTorch, and leaves nothing on the drive."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.parity import SCRIPT, SHORT, Case, assert_parity, outcome, run_case
from tests.support.launch import launch

CASES = [
    Case(stage=1, processes=2, offload="nvme", optimizer=True, steps=SHORT),
    Case(stage=3, processes=2, offload="nvme", evaluates=True, steps=SHORT),
]
MORE = [
    Case(stage=2, processes=2, accumulation=4, offload="cpu"),  # test_documented_usage.py has stage 3 by default
    Case(stage=3, processes=3, accumulation=4, offload="cpu", checkpointing="not_reentrant"),
    Case(stage=2, processes=1, accumulation=4, offload="nvme", clip=False),
    Case(stage=3, processes=4, offload="nvme", tied=True, scheduler=True, optimizer=True),
    Case(stage=0, processes=2, offload="cpu"),
    Case(stage=3, processes=1, offload="nvme", checkpointing="reentrant"),
]


def check(case: Case, folder: Path) -> None:
    assert_parity(case, run_case(case, folder))
    assert not list((folder / "drive").iterdir())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_trainer_with_offload_equals_plain_pytorch(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE, ids=str)
def test_trainer_with_offload_equals_plain_pytorch_elsewhere(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.slow
def test_offload_through_the_real_launcher(tmp_path: Path) -> None:
    case = Case(stage=3, processes=2, offload="nvme")
    assert launch(SCRIPT, case.words(tmp_path), processes=2).check().survivors == 0
    assert_parity(case, outcome(tmp_path))
    assert not list((tmp_path / "drive").iterdir())
