"""Configuration of all tests: markers, seeds, one thread, no network, and the oracle's interpreter."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Set before any Hugging Face library is imported: no test uses the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The threads of an operation that runs on several would wait for each other busily, on cores that other ranks need.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Engines would train on an available GPU, while tests pass models and batches on the CPU: 60 tests failed on an H100.
# GPU-specific code is tested by `make test-gpu`.
if os.environ.get("HF_ZERO_TEST_GPU") != "1":
    os.environ.update(CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")

import torch

# Triton decides at import, and again for every kernel, whether to interpret; other libraries may import it first.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.support import durations
from tests.support.late import VARIABLE, use_if_asked_for
from tests.support.oracle import build_operators
from tests.support.ranks import seed
from tests.support.requirements import missing, oracle_interpreter
from tests.support.starting import STARTED, item_starts_processes


def pytest_configure(config: pytest.Config) -> None:
    """Disable Hypothesis' deadline: on a busy machine any example may take longer than 200 ms. Without the slow tests,
    it tries fewer examples than its default of 100."""
    use_if_asked_for()
    if importlib.util.find_spec("hypothesis") is not None:
        hypothesis = importlib.import_module("hypothesis")
        examples = 40 if "not slow" in config.option.markexpr else 100
        hypothesis.settings.register_profile("hf_zero", deadline=None, max_examples=examples)
        hypothesis.settings.load_profile("hf_zero")


@pytest.hookimpl(tryfirst=True)  # before -m selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes."""
    for item in items:
        if item_starts_processes(item):
            item.add_marker(pytest.mark.processes)


def pytest_collection_finish() -> None:
    """Freeze loaded objects: tests that count tensors collect garbage often, which need not scan all libraries."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise libraries report leaked objects at exit


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write the duration of each test, if the Makefile requests it."""
    if path := os.environ.get("HF_ZERO_DURATIONS"):
        reports = [report for some in terminalreporter.stats.values() for report in some if hasattr(report, "duration")]
        durations.write(Path(path), reports)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that this machine cannot run; the reason lists everything that is missing."""
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
    seed()


@pytest.fixture(autouse=True)
def _same_words_every_time() -> Iterator[None]:
    """Reset the log level that one test may have set for the next."""
    logger = logging.getLogger("hf_zero")
    level = logger.level
    yield
    if logger.level != level:  # setting it clears the caches of all loggers
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def _no_process_unless_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail tests of `make test-quick` that start a process."""
    STARTED.clear()
    yield
    is_quick = "not processes" in request.config.option.markexpr  # in other runs the process may be a compiler
    if is_quick and STARTED and request.node.get_closest_marker("processes") is None:
        pytest.fail(f"it starts a process without the mark `processes`: {STARTED}", pytrace=False)


@pytest.fixture(scope="session")
def oracle() -> str:
    """The interpreter with real DeepSpeed, ready to run; skips if there is none."""
    interpreter = oracle_interpreter()
    if interpreter is None:
        pytest.skip("needs " + " and ".join(missing(oracle=True)))
    build_operators(interpreter)
    return interpreter
