"""Wrong input ends a launch with one clear error and a non-zero exit code, on all ranks, without hanging.

tests/config has the messages, and tests/integration/test_error_report.py what torchrun prints of them.
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.end_to_end import initialize_script
from tests.end_to_end.parity import SCRIPT, Case, run_script
from tests.support.launch import Finished, launch
from tests.support.ranks import RankFailure, run_ranks

INITIALIZE_SCRIPT = Path(__file__).parent / "initialize_script.py"
TIMEOUT_S = 100
GOOD: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 2},
}


def assert_refused(finished: Finished, message: str, *, error: str = r"\w*(Error|Exception)") -> None:
    """It ended by itself, with an error, without leftover processes, and the error is not hidden by others."""
    assert finished.code not in (0, None), f"ended with {finished.code}:\n{finished.output[-6000:]}"
    assert finished.survivors == 0
    # The message itself may follow a headline.
    assert re.search(rf"{error}: (?:.*\n){{0,2}}.*{message}", finished.output), finished.output[-6000:]
    assert "During handling of the above exception" not in finished.output, finished.output[-6000:]


def write(folder: Path, config: Any) -> Path:
    """Writes a ds.json."""
    path = folder / "ds.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def with_stage(stage: Any) -> dict[str, Any]:
    """The good config with another stage."""
    return {**GOOD, "zero_optimization": {"stage": stage}}


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    finished = launch(INITIALIZE_SCRIPT, [tmp_path / "absent.json"], timeout_s=TIMEOUT_S)
    assert_refused(finished, "absent.json", error="ConfigError")


def run_initialize_script(rank: int, config: str) -> str:
    with mock.patch.object(sys, "argv", ["script", config]), mock.patch.object(sys, "stdout", io.StringIO()) as said:
        initialize_script.main()
    return said.getvalue()


def test_the_good_config_of_these_tests_is_accepted(tmp_path: Path) -> None:
    assert run_ranks(run_initialize_script, 2, str(write(tmp_path, GOOD)), init=False) == ["trained\n"] * 2


# Tested by default: ranks that die in tests/integration/test_dying_rank.py, torchrun's handling of errors in
# tests/integration/test_error_report.py.
@pytest.mark.slow
@pytest.mark.parametrize(("stage", "processes"), [(2, 2), *((stage, 3) for stage in (0, 1, 2, 3))])
def test_one_rank_raising_ends_all(stage: int, processes: int, tmp_path: Path) -> None:
    words = [write(tmp_path, with_stage(stage)), 1]
    finished = launch(INITIALIZE_SCRIPT, words, processes=processes, timeout_s=TIMEOUT_S)
    assert_refused(finished, "a fault in the user's model", error="RuntimeError")
    assert "trained" not in finished.output.splitlines()


def trainer_words(folder: Path, config: Any, *more: str) -> list[str]:
    """The Trainer script's command line with another ds.json."""
    words = Case(stage=2, processes=2).words(folder)
    write(folder, config)
    return [*words, *more]


@pytest.mark.slow
def test_a_trainer_script_is_refused(tmp_path: Path) -> None:
    zero = {"stage": 2, "offload_param": {"device": "cpu"}}
    config = {**Case(stage=2).ds_config, "zero_optimization": zero, "hf_zero": {"strict": True}}
    assert_refused(launch(SCRIPT, trainer_words(tmp_path, config), timeout_s=TIMEOUT_S), "offload_param")


@pytest.mark.parametrize(
    ("config", "kind"), [("not json at all", "ConfigError"), (Case(stage=9).ds_config, "ConfigError")]
)
def test_a_trainer_refuses_before_it_trains(config: Any, kind: str, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as raised:
        run_ranks(run_script, 1, trainer_words(tmp_path, config), init=False)
    assert raised.value.kind == kind, raised.value


@pytest.mark.slow
def test_one_rank_of_a_trainer_raising_ends_all(tmp_path: Path) -> None:
    words = trainer_words(tmp_path, Case(stage=2).ds_config, "--fail_on_rank", "1")
    finished = launch(SCRIPT, words, processes=2, timeout_s=TIMEOUT_S)
    assert_refused(finished, "a fault in the user's model", error="RuntimeError")
