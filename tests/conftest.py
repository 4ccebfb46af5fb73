"""What all tests share: markers, seeds, one thread, no hub, and the interpreter of the oracle."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

# Before anything imports a Hugging Face library: no test talks to the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

# Triton decides at its own import, and again for every kernel, whether it interprets; others may import it first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.support.late import VARIABLE, use_if_asked_for
from tests.support.oracle import build_operators
from tests.support.requirements import missing, oracle_interpreter

MARKERS = (
    "slow: minutes, not seconds; `make test` leaves it out",
    "oracle: compares with real DeepSpeed, installed in an environment of its own (make oracle)",
    "gpu: needs at least one GPU",
    "at_once: of memory, or of values that the host looks at in every step: does not hold on the late device",
)
SEED = 1234


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    use_if_asked_for()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run, naming everything that is missing."""
    lacks = missing(
        oracle=item.get_closest_marker("oracle") is not None, gpus=int(item.get_closest_marker("gpu") is not None)
    )
    if item.get_closest_marker("at_once") is not None and os.environ.get(VARIABLE) == "1":
        pytest.skip("holds where the device computes at once")
    if lacks:
        pytest.skip("needs " + " and ".join(lacks))


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def _same_words_every_time() -> Iterator[None]:
    """What one test sets the log to is not what the next one finds."""
    logger = logging.getLogger("hf_zero")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session")
def oracle() -> str:
    """The interpreter that has real DeepSpeed, ready to run; skips where there is none."""
    interpreter = oracle_interpreter()
    if interpreter is None:
        pytest.skip("needs " + " and ".join(missing(oracle=True)))
    build_operators(interpreter)
    return interpreter
