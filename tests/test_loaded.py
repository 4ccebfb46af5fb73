"""What is not used is not imported: extras by a plain step, and torch by commands that do not need it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.loaded import loaded


def test_a_plain_step_loads_no_extra() -> None:
    assert [module for module in loaded() if module.startswith("hf_zero.extras.")] == []


@pytest.mark.parametrize(
    "command", ["", "launch", "explain", "plan", "report", "env", "zero_to_fp32", "universal", "commands"]
)
def test_help_answers_without_torch(command: str) -> None:
    """`plan --help` took ten seconds on a small machine, and so did an error for a misspelled flag."""
    code = (
        "import sys; from hf_zero.__main__ import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: sys.stderr.write('with torch' if 'torch' in sys.modules else 'without torch')"
    )
    words = [sys.executable, "-c", code, *([command] if command else []), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "usage: " in done.stdout and done.stderr == "without torch"


def test_plan_answers_before_it_loads_torch() -> None:
    """It printed nothing until transformers was loaded, which takes most of its time."""
    code = (
        "import builtins, sys; from hf_zero.__main__ import main; load = builtins.__import__\n"
        "def until_torch(name, *rest): return sys.exit('torch') if name == 'torch' else load(name, *rest)\n"
        "builtins.__import__ = until_torch; main(['plan', '8b', '--gpu', 'h100'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines() == ["planning 8b (loading transformers takes a few seconds)", "torch"]
