"""Triton kernels compiled for a GPU that is not there: the compiler needs to know the target, not to have it.

A stand-in driver names the target, and every launch compiles instead of running, on CPU tensors; so what is compiled is
the specialisation that the real launcher asks for. Triton decides at its import whether it interprets: `compile_apart`
starts a process that does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# What each kind of target ends in: machine code, by the assembler that Triton brings along.
BINARY = {"cuda": "cubin", "hip": "hsaco"}
WARP = {"cuda": 32, "hip": 64}


@dataclass(frozen=True)
class Compiled:
    """One kernel in machine code: its name in the source, its argument types, and the bytes of every stage."""

    kernel: str
    signature: dict[str, str]
    stages: dict[str, int]


def compile_apart(module: str, backend: str, arch: int | str, cache: Path, timeout_s: float = 240) -> list[Compiled]:
    """What `module.LAUNCHES` compiles to, in a process of its own without Triton's interpreter.

    module -- its LAUNCHES are functions without arguments that launch kernels on CPU tensors
    backend, arch -- ("cuda", 90) or ("hip", "gfx942")
    cache -- an empty folder: nothing compiled earlier is taken for compiled
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", __name__, module, backend, str(arch)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, f"compiling {module} for {backend} {arch} failed:\n{result.stderr[-6000:]}"
    return [Compiled(**entry) for entry in json.loads(result.stdout.splitlines()[-1])]


class _StandInDriver:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _launches_compile(target: Any, compiled: list[Compiled]) -> Iterator[None]:
    """Inside, launching a kernel appends it to `compiled` and runs nothing."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **keywords: Any) -> Any:
        result = run(kernel, *args, **{**keywords, "warmup": True})
        assert result is not None, f"{kernel.fn.__qualname__}: Triton compiled nothing"
        signature = {name: str(kind) for name, kind in result.src.signature.items()}
        stages = {stage: len(content) for stage, content in result.asm.items()}
        compiled.append(Compiled(f"{kernel.fn.__module__}.{kernel.fn.__qualname__}", signature, stages))
        return result

    driver.set_active(_StandInDriver(target))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


def compile_launches(launches: list[Callable[[], None]], backend: str, arch: int | str) -> list[Compiled]:
    """Every kernel that the launches would have started, compiled; needs a process without interpreter."""
    from triton.backends.compiler import GPUTarget

    compiled: list[Compiled] = []
    with _launches_compile(GPUTarget(backend, arch, WARP[backend]), compiled):
        for launch in launches:
            launch()
    return compiled


def _main(module: str, backend: str, arch: str) -> None:
    import importlib

    launches = importlib.import_module(module).LAUNCHES
    compiled = compile_launches(launches, backend, int(arch) if arch.isdigit() else arch)
    sys.stdout.write("\n" + json.dumps([asdict(entry) for entry in compiled]) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
