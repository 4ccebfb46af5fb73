"""examples/tensor_parallel.py on 2 and 4 CPU ranks: the losses of one rank, and full weights at the end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from tests.examples.conftest import EXAMPLES
from tests.support.launch import launch

pytestmark = pytest.mark.slow

WORDS = ["--cpu", "--length", 64, "--rows", 16]


def numbers(words: Sequence[object], processes: int) -> tuple[int, list[float]]:
    """Parameters on a rank, and the losses."""
    done = launch(EXAMPLES / "tensor_parallel.py", [*WORDS, *words], processes=processes, timeout_s=250).check()
    held = re.findall(r"(\d+) parameters on each rank", done.output)
    return int(held[0]), [float(number) for number in re.findall(r"loss ([\d.]+)", done.output)]


def test_any_number_of_ranks(tmp_path: Path) -> None:
    whole, alone = numbers([], 1)
    parts, two = numbers(["--output", tmp_path / "saved"], 2)
    assert len(alone) == 8 and two == pytest.approx(alone, abs=2e-5)
    assert alone[-1] < alone[0] - 0.5 and parts < 0.6 * whole
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert saved.num_parameters() == whole
    _, four = numbers(["--tp_size", 2, "--zero_stage", 2], 4)
    assert len(four) == 4 and four[0] == pytest.approx(alone[0], abs=2e-5)
