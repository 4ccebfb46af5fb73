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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.assembly import Assembly, assemblies_of, occupancy
from tests.support.machine_code import bytes_per_element, complaints, read_machine, words_of

# What each kind of target ends in: machine code, by the assembler that Triton brings along.
BINARY = {"cuda": "cubin", "hip": "hsaco"}
WARP = {"cuda": 32, "hip": 64}


class Launch(NamedTuple):
    """Something that launches kernels on CPU tensors, and whether vectors begin and end at multiples of 16 elements."""

    call: Callable[[], object]
    is_aligned: bool = True


@dataclass(frozen=True)
class Compiled:
    """One specialisation of a kernel in machine code.

    Attributes:
        kernel: its name in the source.
        signature: type by argument; "constexpr" for what is compiled in.
        stages: bytes of every stage.
        wrong: where it is not as its docstring says.
        num_bytes: per element; None where the docstring does not speak of elements.
        said_bytes: the same as the docstring has it, for the case that it names.
        seconds: of CPU time from the launch to machine code, assembler included.
        may_fuse: whether the compiler was told to add products without rounding them first.
        constants: values of the signature's "constexpr", less those that say that an argument is absent.
        occupancy: share of a processor's warps that can be there at once.
        pieces: "load 16" -> instructions of a thread that move so many bytes.
        elements_per_thread, instructions_per_element: of the longest vector; slow paths count like all others.
        pipes_per_element: what executes how many of them, without slow paths (`Assembly.pipes`).
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
    """What launches compile to, each specialisation once, in a process of its own without Triton's interpreter.

    module, launches -- where the list of `Launch` is
    backend, arch -- ("cuda", 90) or ("hip", "gfx942")
    cache -- an empty folder: nothing compiled earlier is taken for compiled
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # A default of some versions that kernels do not rely on: whether products are fused with additions.
    environment |= {"TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "0"}
    command = [sys.executable, "-m", __name__, module, launches, backend, str(arch)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, f"compiling {module} for {backend} {arch} failed:\n{result.stderr[-6000:]}"
    return [Compiled(**entry) for entry in json.loads(result.stdout.splitlines()[-1])]


class StandInDriver:
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
def _launches_compile(target: Any, found: Callable[[Any, Any, float], None]) -> Iterator[None]:
    """Inside, launching a kernel tells `found` (kernel, what it was compiled to, seconds) and runs nothing."""
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
    """Every specialisation that the launches would have started; needs a process without interpreter."""
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
    """A kernel and what it was compiled to."""

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
