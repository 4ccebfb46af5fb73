"""The compiled code of kernels runs on the CPU, and equals its references."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.kernels.executed_cases import CASES
from tests.kernels.test_compilation import kernels
from tests.support.executed import READ, run_apart
from tests.support.requirements import requires
from tests.test_imports import PACKAGE, ROOT

pytestmark = [requires(modules=("triton", "llvmlite")), pytest.mark.timeout(600)]

MODULE = "tests.kernels.executed_cases"
# Each list runs in one process, whose startup takes as long as two kernels. Exchanging ones have their file's name.
EXCHANGING = ["lamb", "lamb with eps inside", "norm", "signs", "quantize", "adam8"]
FEW = [name for name in CASES if name.startswith("few of ")]
ELEMENTWISE = [name for name in CASES if name not in (*EXCHANGING, *FEW)]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(FEW, id="few"),
        pytest.param(ELEMENTWISE, id="elementwise", marks=pytest.mark.slow),
        pytest.param(EXCHANGING, id="exchanging", marks=pytest.mark.slow),  # threads take turns
    ],
)
def test_compiled_code(names: list[str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    try:
        ends = run_apart(MODULE, names, tmp_path)
    except AssertionError as error:  # the process has ended
        ends = {"kernels": f"unreadable: {error}"}
    versions = tuple(".".join(version(package).split(".")[:2]) for package in ("triton", "llvmlite"))
    unread = [end for end in ends.values() if end.startswith("unreadable")]
    if unread and versions not in READ and "not slow" in request.config.option.markexpr:
        pytest.skip(f"the code of triton {versions[0]} is not read with llvmlite {versions[1]}: {unread[0][:200]}")
    have_run = ends.pop("kernels")
    assert ends == dict.fromkeys(names, "")
    exchange = {name for name in kernels() if name.split(".")[-2] in EXCHANGING}
    assert set(have_run.split()) == (exchange if names is EXCHANGING else kernels() - exchange), "add a check"


# File, correct code, mutated code, and the case that has to detect it.
MUTATIONS = [
    ("adam", "beta2 * v + rest2 * g * g", "beta2 * v + rest2 * g", "adamw"),
    ("adam", "(tl.sqrt(v * inverse2) + eps)", "tl.sqrt(v * inverse2 + eps)", "adam"),
    ("adam", "m * inverse1", "m", "adamw"),
    ("lion", "beta2 * m + rest2 * g", "beta1 * m + rest2 * g", "lion"),
    ("lion", "tl.where(c == c, 0.0, c)", "0.0", "lion"),
    ("sgd", "g += momentum * b", "g = momentum * b", "sgd with nesterov"),
    ("adagrad", "s += g * g", "s = g * g", "adagrad"),
    ("frozen_adam", "p -= rate * update", "p -= rate * update * 1.0001", "frozen adam"),
    ("blocks", "offsets < numel", "offsets <= numel", "sgd"),
    ("blocks", "tl.load(skip) == 0", "tl.load(skip) >= 0", "lion"),
    ("blocks", "& 0xFFFF\n", "& 0x7FFF\n", "lion"),
    ("blocks", "value * tl.load(scale_tensor)", "value", "sgd"),
    ("lamb", "tl.load(row + 2)", "tl.load(row + 2) * 0", "lamb"),
    ("lamb", "tl.sum(u * u, axis=0)", "tl.sum(u * p, axis=0)", "lamb"),
    ("lamb", "tl.load(place + 1, mask", "tl.load(place, mask", "lamb"),
    ("norm", "tl.sum(x * x, axis=0)", "tl.sum(x * x, axis=0) * 1.000001", "norm"),
    ("signs", "y >= 0", "y > 0", "signs"),
    ("signs", "1 << columns[None, :], 0", "1 << (7 - columns[None, :]), 0", "signs"),
    ("quantize", "(x + 12582912.0) - 12582912.0", "tl.floor(x + 0.5)", "quantize"),
    ("quantize", "beta * old + rest", "beta * beta * old + rest", "quantize"),
    ("quantize", "(high << 4)", "(high << 3)", "quantize"),
    ("quantize", "start += part_stride", "start += 0", "quantize"),
    ("adam8", "tl.where(mask, beta1 * m + rest1 * g, m)", "beta1 * m + rest1 * g", "adam8"),
    ("adam8", "(bits >> 31)) ^ 1, axis=0)", "(bits >> 31)), axis=0)", "adam8"),
    ("adam8", "tl.where(size > 0, 2.0, 0.0)", "0.0", "adam8"),
    ("adam8", "u - 0.5, u * 1.25", "u, u * 1.25", "adam8"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "right", "wrong", "case"), MUTATIONS)
def test_one_wrong_line_is_noticed(file: str, right: str, wrong: str, case: str, tmp_path: Path) -> None:
    """Only the results of the compiled code are checked, not the source."""
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    os.symlink(ROOT / "tests", tmp_path / "tests")
    source = tmp_path / PACKAGE / "kernels" / "gpu" / f"{file}.py"
    text = source.read_text(encoding="utf-8")
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong), encoding="utf-8")
    found = run_apart(MODULE, [case], tmp_path / "cache", root=tmp_path)[case]
    assert found and not found.startswith("unreadable"), found
