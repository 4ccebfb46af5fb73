"""Code that catches DeepSpeed's errors, or matches their text, also works with hf_zero's, for the same wrong setups."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch

import hf_zero
from hf_zero.config import ConfigError, Problem
from hf_zero.config.errors import DeepSpeedConfigError
from tests.config.deepspeed_answers import ask_deepspeed
from tests.config.wrong_setups import NO_MODEL, RAISED, SETUPS, WITHOUT_WORDS, WORDS
from tests.support.ranks import free_port

CATCHES = {
    "AssertionError": AssertionError,
    "DeepSpeedConfigError": DeepSpeedConfigError,
    "NotImplementedError": NotImplementedError,
    "TypeError": TypeError,
    "ValidationError": ValueError,
    "ValueError": ValueError,
}
PROGRAM = """
import os, sys, torch, deepspeed
# Would compile for minutes, and nothing here communicates. (`deepspeed.comm.torch` as an attribute is PyTorch.)
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(given["port"]))
answer = {}
for name, config in given["setups"].items():
    model = None if name == given["no_model"] else torch.nn.Linear(4, 4)
    parameters = None if model is None else model.parameters()
    try:
        deepspeed.initialize(model=model, model_parameters=parameters, config=config)
        answer[name] = ["nothing", ""]
    except BaseException as error:
        answer[name] = [type(error).__name__, str(error)]
"""


@pytest.mark.parametrize("name", SETUPS)
def test_an_error_is_caught_by_what_was_written_for_deepspeeds(name: str) -> None:
    """`except AssertionError`, `pytest.raises(TypeError)` and `match=` of other test suites match hf_zero's errors."""
    model = None if name == NO_MODEL else torch.nn.Linear(4, 4)
    with pytest.raises(CATCHES[RAISED[name]], match=WORDS.get(name)) as caught:
        hf_zero.initialize(model=model, config=copy.deepcopy(SETUPS[name]))
    if name != NO_MODEL:
        assert isinstance(caught.value, ConfigError) and type(caught.value).__name__ == "ConfigError"


def test_an_error_is_of_no_type_that_its_problems_do_not_call_for() -> None:
    error = ConfigError(Problem("zero_optimization.stage", 7, "must be 0, 1, 2 or 3", "choose one"))
    assert type(error) is ConfigError and not isinstance(error, (AssertionError, TypeError))
    asserted = Problem("optimizer.type", "A", "is none", "", raises=AssertionError)
    both = ConfigError(iter([asserted, Problem("optimizer.params", {}, "no", "", raises=TypeError)]))
    assert isinstance(both, AssertionError) and isinstance(both, TypeError) and len(both.problems) == 2
    travelled = pickle.loads(pickle.dumps(both))
    assert type(travelled) is type(both) and str(travelled) == str(both)


@pytest.mark.oracle
def test_the_record_is_what_deepspeed_raises(tmp_path: Path) -> None:
    given = {"setups": SETUPS, "no_model": NO_MODEL, "port": free_port()}
    answers = ask_deepspeed(PROGRAM, given, tmp_path, timeout_s=240)
    assert {name: kind for name, (kind, _) in answers.items()} == RAISED
    assert WORDS.keys() | WITHOUT_WORDS.keys() == SETUPS.keys()
    assert [name for name, words in WORDS.items() if not re.search(words, answers[name][1])] == []
