"""What all tests share: marks, seeds, one thread, no hub, and the interpreter of the oracle."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything imports a Hugging Face library: no test talks to the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Engines train on a GPU where one is, and tests hand them models and batches on the CPU: 60 failed on an H100. What has
# a form of its own on a GPU is tested by `make test-gpu`.
if os.environ.get("HF_ZERO_TEST_GPU") != "1":
    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")

import torch

# Triton decides at its own import, and again for every kernel, whether it interprets; others may import it first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.support import durations
from tests.support.late import VARIABLE, use_if_asked_for
from tests.support.oracle import build_operators
from tests.support.requirements import missing, oracle_interpreter
from tests.support.starting import STARTED, item_starts_processes

SEED = 1234


def pytest_configure() -> None:
    """Hypothesis measures no times: on a busy machine every example may take longer than its 200 ms."""
    use_if_asked_for()
    if importlib.util.find_spec("hypothesis") is not None:
        hypothesis = importlib.import_module("hypothesis")
        hypothesis.settings.register_profile("hf_zero", deadline=None)
        hypothesis.settings.load_profile("hf_zero")


@pytest.hookimpl(tryfirst=True)  # before -m chooses by the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes."""
    for item in items:
        if item_starts_processes(item):
            item.add_marker(pytest.mark.processes)


def pytest_collection_finish() -> None:
    """Collections of garbage, of which tests that count tensors ask for many, need not look through all libraries."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or libraries say at the end that their objects are left


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Record how long each test took, where the Makefile asks for it."""
    if path := os.environ.get("HF_ZERO_DURATIONS"):
        reports = [report for some in terminalreporter.stats.values() for report in some if hasattr(report, "duration")]
        durations.write(Path(path), reports)


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


@pytest.fixture(autouse=True)
def _no_process_unless_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """What `make test-quick` runs starts no process."""
    STARTED.clear()
    yield
    is_quick = "not processes" in request.config.option.markexpr  # elsewhere a compiler may be one
    if is_quick and STARTED and request.node.get_closest_marker("processes") is None:
        pytest.fail(f"it starts a process without the mark `processes`: {STARTED}", pytrace=False)


@pytest.fixture(scope="session")
def oracle() -> str:
    """The interpreter that has real DeepSpeed, ready to run; skips where there is none."""
    interpreter = oracle_interpreter()
    if interpreter is None:
        pytest.skip("needs " + " and ".join(missing(oracle=True)))
    build_operators(interpreter)
    return interpreter
