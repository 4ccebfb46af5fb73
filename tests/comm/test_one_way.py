"""Gathers call downwards only: nothing of an engine is called by the code that agrees on a gather and runs it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

import hf_zero
from hf_zero.comm import outside_transforms, uncompiled
from tests.hostile.programs import random_program
from tests.hostile.threads import run_in_order
from tests.support.in_process import RandomSchedule

pytestmark = pytest.mark.lengthy

PACKAGE = str(Path(hf_zero.__file__).parent) + "/"
BELOW = ("comm/", "device/", "kernels/", "layout/", "offload/")
WRAPPERS = {uncompiled(str).__code__, outside_transforms(str).__code__}  # of functions that hooks call


def package_of(frame: FrameType | None) -> str:
    path = "" if frame is None else frame.f_code.co_filename
    return path.removeprefix(PACKAGE) if path.startswith(PACKAGE) else ""


@contextmanager
def calls_upwards() -> Iterator[set[str]]:
    """Functions of params/ and grads/ that are called by functions of lower packages, in all threads started inside."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            path, caller = package_of(frame), frame.f_back
            if caller is not None and caller.f_code in WRAPPERS:
                caller = caller.f_back
            if path.startswith(("params/", "grads/")) and package_of(caller).startswith(BELOW):
                found.add(f"{path} {frame.f_code.co_name}")

    threading.setprofile(note)
    try:
        yield found
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("apart", [False, True], ids=["in shared memory", "by collectives"])
def test_no_gather_calls_the_engine(apart: bool) -> None:
    """The path of one gather went down from the prefetcher to the negotiation, and up again for the row and a buffer.
    From a reduction it went down, up and down once more, because the negotiation asked engines by callbacks."""
    programs = [program for program in map(partial(random_program, size="small"), range(12)) if program.stage == 3]
    with calls_upwards() as found:
        for program in programs[:3]:
            verdict = run_in_order(program, RandomSchedule(program.seed, 0.3), apart=apart)
            assert verdict.is_ok, verdict
    assert not {each for each in found if each.startswith("params/")}
    assert found or apart, "reductions are called while a rank waits, so the search finds calls"
