"""The example of sequence parallelism: two ranks give the same losses as one, and four in two groups train."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from tests.examples.conftest import EXAMPLES
from tests.support.launch import launch

pytestmark = pytest.mark.slow
WORDS = ("--cpu", "--length", 64, "--rows", 16)


def losses(words: Sequence[object], processes: int) -> list[float]:
    done = launch(EXAMPLES / "sequence_parallel.py", [*WORDS, *words], processes=processes, timeout_s=250).check()
    return [float(number) for number in re.findall(r"loss ([\d.]+)", done.output)]


def test_stages_and_sizes_agree() -> None:
    two, three = losses(["--zero_stage", 2], 2), losses(["--zero_stage", 3], 2)
    assert len(two) == 8 and two == pytest.approx(three, abs=2e-5)
    assert two[-1] < two[0] - 0.5
    four = losses(["--sp_size", 2, "--zero_stage", 1], 4)
    assert len(four) == 4 and four[0] == pytest.approx(two[0], abs=2e-5)


def test_a_hybrid_model() -> None:
    two, four = losses(["--hybrid"], 2), losses(["--hybrid", "--zero_stage", 3], 4)
    assert len(two) == 8 and two == pytest.approx(four, abs=2e-5)
    assert two[-1] < two[0] - 0.5
