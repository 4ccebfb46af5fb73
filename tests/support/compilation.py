"""Compiles Triton kernels for an absent GPU: the compiler only needs to know the target.

A fake driver names the target, and every launch compiles instead of running, on CPU tensors. So the compiled
specialisation is the one that the real launcher requests. Triton decides at import whether to interpret:
`compile_apart` starts a process that does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.assembly import Assembly, assemblies_of, occupancy
from tests.support.machine_code import bytes_per_element, complaints, read_machine, words_of

# The final stage of each kind of target: machine code, from the assembler included in Triton.
BINARY = {"cuda": "cubin", "hip": "hsaco"}
WARP = {"cuda": 32, "hip": 64}


class Launch(NamedTuple):
    """A function that launches kernels on CPU tensors; whether vectors begin and end at multiples of 16 elements."""

    call: Callable[[], object]
    is_aligned: bool = True


@dataclass(frozen=True)
class Compiled:
    """Machine code of one specialisation of a kernel.

    Attributes:
        kernel: its name in the source.
        signature: type by argument; "constexpr" for compile-time constants.
        stages: bytes of every compilation stage.
        wrong: contradictions to its docstring.
        num_bytes: per element; None if the docstring does not mention elements.
        said_bytes: the same according to the docstring, for the case that it names.
        seconds: CPU time from launch to machine code, assembler included.
        may_fuse: whether the compiler may fuse products with additions, without intermediate rounding.
        constants: values of the signature's "constexpr", except those that mark an argument as absent.
        occupancy: share of a processor's warps that can be resident at once.
        pieces: "load 16" -> number of instructions of a thread that move this many bytes.
        elements_per_thread, instructions_per_element: of the longest vector; slow paths are included.
        pipes_per_element: instructions by execution pipe, without slow paths (`Assembly.pipes`).
    """

    kernel: str
    signature: dict[str, str]
    stages: dict[str, int]
    is_aligned: bool
    wrong: list[str]
    num_bytes: float | None
    said_bytes: float | None
    seconds: float
    constants: dict[str, Any]
    registers: int
    occupancy: float
    spilled_bytes: int
    shared_bytes: int
    barriers: int
    atomics: int
    fused: int
    may_fuse: bool
    pieces: dict[str, int]
    elements_per_thread: int
    instructions_per_element: float
    pipes_per_element: dict[str, float]


def compile_apart(
    module: str, backend: str, arch: int | str, cache: Path, timeout_s: float = 240, launches: str = "QUICK"
) -> list[Compiled]:
    """Compiles every specialisation of the launches once, in a separate process without Triton's interpreter.

    module, launches -- the module and name of the list of `Launch`
    backend, arch -- ("cuda", 90) or ("hip", "gfx942")
    cache -- an empty folder, so that nothing compiled earlier is reused
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Some versions fuse products with additions by default; kernels do not rely on it.
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "0"}
    command = [sys.executable, "-m", __name__, module, launches, backend, str(arch)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, f"compiling {module} for {backend} {arch} failed:\n{result.stderr[-6000:]}"
    return [Compiled(**entry) for entry in json.loads(result.stdout.splitlines()[-1])]


class StandInDriver:
    """The part of a Triton driver that compiling needs."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _launches_compile(target: Any, found: Callable[[Any, Any, float], None]) -> Iterator[None]:
    """Inside, launching a kernel calls `found` (kernel, compilation result, seconds) and runs nothing."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **keywords: Any) -> Any:
        start = sum(os.times()[:4])
        result = run(kernel, *args, **{**keywords, "warmup": True})
        assert result is not None, f"{kernel.fn.__qualname__}: Triton compiled nothing"
        found(kernel, result, sum(os.times()[:4]) - start)
        return result

    driver.set_active(StandInDriver(target))
    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


def compile_launches(launches: Sequence[Launch], backend: str, arch: int | str) -> list[Compiled]:
    """Compiles every specialisation that the launches would have started; needs a process without interpreter."""
    from triton.backends.compiler import GPUTarget

    compiled: dict[str, _Found] = {}
    is_aligned = True

    def found(kernel: Any, result: Any, seconds: float) -> None:
        compiled.setdefault(result.hash, _Found(kernel, result, seconds, is_aligned))

    with _launches_compile(GPUTarget(backend, arch, WARP[backend]), found):
        for launch in launches:
            is_aligned = launch.is_aligned
            launch.call()
    read = assemblies_of([each.result for each in compiled.values()], arch)
    pairs = zip(compiled.values(), read, strict=True)
    return [_examined(each, assembly, arch, WARP[backend]) for each, assembly in pairs]


class _Found(NamedTuple):
    """A kernel and its compilation result."""

    kernel: Any
    result: Any
    seconds: float
    is_aligned: bool


def _examined(found: _Found, assembly: Assembly, arch: int | str, warp: int) -> Compiled:
    kernel, result, seconds, is_aligned = found
    signature = {name: str(kind) for name, kind in result.src.signature.items()}
    names = list(signature)
    constants = {names[place[0]]: value for place, value in result.src.constants.items() if value is not None}
    machine = read_machine(result, assembly, warp)
    words = words_of(kernel.fn.__doc__ or "", set(signature))
    each = machine.elements // machine.threads
    return Compiled(
        kernel=f"{kernel.fn.__module__}.{kernel.fn.__qualname__}",
        signature=signature,
        stages={stage: len(content) for stage, content in result.asm.items()},
        is_aligned=is_aligned,
        wrong=complaints(machine, words, is_aligned=is_aligned),
        num_bytes=None if words is None else bytes_per_element(machine),
        said_bytes=None if words is None else words.num_bytes,
        seconds=seconds,
        constants=constants,
        registers=assembly.registers,
        occupancy=occupancy(assembly, arch, result.metadata.num_warps),
        spilled_bytes=assembly.spilled_bytes,
        shared_bytes=assembly.shared_bytes,
        barriers=assembly.barriers,
        atomics=assembly.atomics,
        fused=assembly.fused,
        may_fuse=result.metadata.enable_fp_fusion,
        pieces={f"{'store' if stores else 'load'} {size}": n for (stores, size), n in sorted(assembly.pieces.items())},
        elements_per_thread=each,
        instructions_per_element=assembly.instructions / max(1, each),
        pipes_per_element={pipe: count / max(1, each) for pipe, count in assembly.pipes.items()},
    )


def _main(module: str, launches: str, backend: str, arch: str) -> None:
    import importlib

    wanted = getattr(importlib.import_module(module), launches)
    compiled = compile_launches(wanted, backend, int(arch) if arch.isdigit() else arch)
    sys.stdout.write("\n" + json.dumps([asdict(entry) for entry in compiled]) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
