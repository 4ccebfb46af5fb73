"""Every Triton kernel compiles to machine code for real GPUs, without one, and has its documented costs."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

import hf_zero.kernels.gpu
from tests.support.budgets import ELEMENTWISE, EXCESS, FIGURES_OF, budget_of, over, short
from tests.support.compilation import BINARY, Compiled, compile_apart
from tests.support.requirements import requires

pytestmark = requires(modules=("triton",))

TARGETS = [("cuda", 90), ("cuda", 80), ("cuda", 100), ("hip", "gfx942")]


# Kernels without divisions, which have fused instructions of their own.
WITH_PRODUCTS = {"lion._lion", "sgd._sgd", "norm._squares"}


def _is_jitted(node: ast.stmt) -> bool:
    if not isinstance(node, ast.FunctionDef):
        return False
    return any(ast.unparse(mark).startswith("triton.jit") for mark in node.decorator_list)


def kernels() -> set[str]:
    """Jitted functions of hf_zero.kernels.gpu that no other one calls: those that are launched, as module.name."""
    jitted: dict[str, str] = {}  # name -> module
    called: set[str] = set()
    for path in Path(hf_zero.kernels.gpu.__path__[0]).glob("*.py"):
        for function in filter(_is_jitted, ast.parse(path.read_text()).body):
            jitted[function.name] = f"hf_zero.kernels.gpu.{path.stem}"  # type: ignore[attr-defined]
            calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
            called |= {callee.id for callee in calls if isinstance(callee, ast.Name)}
    return {f"{module}.{name}" for name, module in jitted.items() if name not in called}


def examine(compiled: list[Compiled], backend: str) -> None:
    """Every kernel compiles to machine code that matches its docstring."""
    assert {entry.kernel for entry in compiled} == kernels()
    for entry in compiled:
        assert entry.stages.get(BINARY[backend], 0) > 0, f"{entry.kernel} ended before machine code: {entry.stages}"
        assert entry.wrong == [], f"{entry.kernel}, {entry.signature}"
        if version("triton").startswith(FIGURES_OF):
            assert list(over(entry, budget_of(entry, backend))) == [], f"{entry.kernel}, {entry.signature}"
        # Set explicitly, because here Triton's default is the opposite (tests/support/compilation.py).
        assert entry.may_fuse, entry.kernel
        assert entry.fused > 0 or short(entry.kernel) not in WITH_PRODUCTS, f"{entry.kernel}: products are not fused"
    for kernel in {entry.kernel for entry in compiled if entry.said_bytes is not None}:
        entries = [entry for entry in compiled if entry.kernel == kernel]
        # No argument moves twice (that would be in `wrong`), so the case in the docstring stands for all.
        assert entries[0].said_bytes in {entry.num_bytes for entry in entries}, kernel


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled]:
    return compile_apart("tests.kernels.launches", "cuda", 90, tmp_path_factory.mktemp("few"), launches="FEW")


def test_every_kernel_compiles(few: list[Compiled]) -> None:
    """Three helpers used Python's `Any` in their annotations. Triton's interpreter, in which all other tests of these
    kernels run, ignores annotations, but the compiler rejects it. So on a GPU the first step of every optimizer ended
    in a CompilationError, which no test detected."""
    examine(few, "cuda")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "arch"), TARGETS)
def test_every_kernel_compiles_without_options(backend: str, arch: int | str, tmp_path: Path) -> None:
    examine(compile_apart("tests.kernels.launches", backend, arch, tmp_path, 600), backend)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("backend", "arch"), TARGETS)
def test_every_specialisation_compiles(backend: str, arch: int | str, tmp_path: Path) -> None:
    """All dtypes and options that an engine has."""
    examine(compile_apart("tests.kernels.launches", backend, arch, tmp_path, 3500, "ALL"), backend)


def _without(entry: Compiled, flag: str) -> bool:
    """Whether this is bf16 training without that flag, which no other launch is."""
    return entry.signature["gradient"] == "*bf16" and entry.signature[flag] == "constexpr"


def test_numbers_make_no_specialisation(few: list[Compiled]) -> None:
    """`"weight_decay": 0` in ds.json was passed to the kernel as an integer, for which it was compiled again; and a
    seed of 1 or a multiple of 16 caused a compilation in the middle of training."""
    with_integers = [entry for entry in few if entry.kernel.endswith("._adam") and _without(entry, "skip")]
    with_seeds = [entry for entry in few if entry.kernel.endswith("._lion") and entry.signature["weight"] == "*bf16"]
    assert [entry.signature["lr"] for entry in with_integers] == ["fp32"] and len(with_seeds) == 1


@pytest.mark.slow  # checks `examine` on kernels with defects
def test_faults_are_found(tmp_path: Path) -> None:
    """The checks of every kernel fail for a kernel with the defect."""
    found = compile_apart("tests.kernels.faulty_kernels", "cuda", 90, tmp_path, launches="FAULTY")
    twice, unsaid, twos, spills, shared, unordered, apart, together = found
    assert twice.wrong[:2] == ["source is loaded 2 times", "target is stored 2 times"]
    assert unsaid.wrong == ["target is loaded, which its docstring does not say"]
    assert len(twos.wrong) == 1 and twos.wrong[0].startswith("32 of 64 bytes of a thread move in pieces of 16")
    assert any(word.endswith("bytes of registers are spilled") for word in spills.wrong)
    excess = [[word.partition(":")[0] for word in over(entry, ELEMENTWISE["cuda"])] for entry in (shared, unordered)]
    assert excess[0][-2:] == ["shared_bytes", "barriers"] and excess[1][-1] == "atomics"
    assert any(word.startswith("spilled_bytes") for word in over(spills, ELEMENTWISE["cuda"]))
    assert (apart.may_fuse, apart.fused, together.may_fuse) == (False, 0, True) and together.fused > 0
    assert list(over(replace(unsaid, registers=33), ELEMENTWISE["cuda"])) == ["registers: 33, at most 32"]


def test_what_costs_more_has_a_reason() -> None:
    assert EXCESS.keys() <= {short(kernel) for kernel in kernels()}
    assert all(entry.why and ELEMENTWISE["cuda"] != entry.cuda for entry in EXCESS.values())


@pytest.mark.slow  # a separate compiler process for one helper
def test_what_the_compiler_refuses_fails(tmp_path: Path) -> None:
    """The original bug: a helper with `Any` in its annotations."""
    with pytest.raises(AssertionError, match=r"(?s)faulty_kernels for cuda 90 failed:.*\bAny\b"):
        compile_apart("tests.kernels.faulty_kernels", "cuda", 90, tmp_path, launches="REFUSED")
