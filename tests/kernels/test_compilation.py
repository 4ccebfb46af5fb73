"""Every Triton kernel compiles to machine code for real GPUs, without one."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hf_zero.kernels.gpu
from tests.support.compilation import BINARY, compile_apart
from tests.support.requirements import requires

pytestmark = requires(modules=("triton",))

FIRST = ("cuda", 90)
OTHERS = [("cuda", 80), ("cuda", 100), ("hip", "gfx942")]


def _is_jitted(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any(ast.unparse(mark) == "triton.jit" for mark in node.decorator_list)


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


@pytest.mark.parametrize(
    ("backend", "arch"), [FIRST, *(pytest.param(*target, marks=pytest.mark.slow) for target in OTHERS)]
)
def test_every_kernel_compiles(backend: str, arch: int | str, tmp_path: Path) -> None:
    """Three helpers named Python's `Any` in their annotations. Triton's interpreter, under which all other tests of
    these kernels run, does not look at annotations; the compiler does, and refuses. So on a GPU the first step of
    every optimizer ended in a CompilationError, and no test said so."""
    compiled = compile_apart("tests.kernels.launches", backend, arch, tmp_path)
    assert {entry.kernel for entry in compiled} == kernels()
    for entry in compiled:
        assert entry.stages.get(BINARY[backend], 0) > 0, f"{entry.kernel} ended before machine code: {entry.stages}"
