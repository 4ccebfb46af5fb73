"""Compiles Triton kernels for AMD's gfx942 and runs the compiled code on a CPU.

The interpreter involves no compiler. Here all of Triton's pipeline runs, down to LLVM's optimised code, which is
generic except for a few AMD intrinsics. After replacing those, LLVM's JIT compiler (llvmlite) compiles the code to a
function, in which threads take turns (tests/support/wavefronts.py). Unsupported code raises `Unreadable`.

`python -m tests.support.executed MODULE NAME ...` calls functions of the module's `CASES`, running every launch in this
way, and prints {name: error or ""}; `run_apart` starts that, since Triton decides at import whether to interpret.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import json
import os
import re
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support.compilation import WARP, StandInDriver
from tests.support.wavefronts import Threads, Unreadable, run_of, with_exchanges

# Versions of Triton and llvmlite whose code is known to be readable and to run: with these it must.
READ = {("3.9", "0.50"), ("3.6", "0.50")}
TARGET = ("hip", "gfx942")


def run_apart(
    module: str, names: list[str], cache: Path, timeout_s: float = 580, root: Path | None = None
) -> dict[str, str]:
    """Runs each of the module's cases in a separate process; returns "" or the error. "kernels": the kernels that ran.

    cache -- an empty folder, so that no earlier compiled code runs
    root -- of the sources; None: the present process' folder
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(cache), "AMDGCN_USE_BUFFER_OPS": "0"}
    if root is not None:  # a process' working folder comes after what its startup hooks import
        environment["PYTHONPATH"] = str(root)
    command = [sys.executable, "-m", __name__, module, *names]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, cwd=root)
    assert result.returncode == 0, f"running {module} compiled failed:\n{result.stderr[-6000:]}"
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return found


# From AMD's code to a function of the CPU

_KERNEL = re.compile(r"^define amdgpu_kernel void @(\w+)\((.*)\)[^()]*\{$", re.MULTILINE)
_PROGRAM = "i32 %program_x, i32 %program_y"
_IDS = {"workgroup.id.x": "program_x", "workgroup.id.y": "program_y"}
# AMD's name -> the generic LLVM name.
_SAME = {"llvm.amdgcn.sqrt.f32": "llvm.sqrt.f32", "llvm.amdgcn.exp2.f32": "llvm.exp2.f32"}
# Newer LLVMs write NaN with its payload; llvmlite expects its bits: the prefix, those of a quiet NaN, and the sign.
_NAN = re.compile(r"(bfloat|half|float) ([+-])(?:q?nan)(?:\((0x[0-9A-Fa-f]+)\))?")
_NAN_BITS = {"bfloat": ("0xR", 0x7FC0, 0x8000), "half": ("0xH", 0x7E00, 0x8000)}
# x86 calls this function where AMD has an instruction: fp32 to the nearest bf16, ties to even.
_TO_BF16 = """
define bfloat @__truncsfbf2(float %value) {
  %bits = bitcast float %value to i32
  %is_nan = fcmp uno float %value, 0.0
  %high = lshr i32 %bits, 16
  %odd = and i32 %high, 1
  %half = add i32 %odd, 32767
  %sum = add i32 %bits, %half
  %rounded = lshr i32 %sum, 16
  %quiet = or i32 %high, 64
  %chosen = select i1 %is_nan, i32 %quiet, i32 %rounded
  %short = trunc i32 %chosen to i16
  %result = bitcast i16 %short to bfloat
  ret bfloat %result
}
"""


def for_cpu(text: str) -> tuple[str, list[str]]:
    """Rewrites LLVM code for gfx942 for any CPU, with a function @run; also returns the kernel's parameter types."""
    kernel = _KERNEL.search(text)
    if kernel is None:
        raise Unreadable(f"no kernel in: {text[:500]}")
    types = [word.split()[0] for word in re.sub(r"\([^()]*\)", "", kernel[2]).split(",")]
    text = re.sub(
        r"^(?:target |declare .*@llvm\.amdgcn\.|![\w.]+ = |source_filename).*\n", "", text, flags=re.MULTILINE
    )
    text = re.sub(r"(?:, )?!(?:dbg|mmra|llvm\.loop|amdgpu\.\w+|noalias|alias\.scope) !\d+", "", text)
    text = re.sub(r"^attributes #(\d+) = .*", r"attributes #\1 = { nounwind }", text, flags=re.MULTILINE)
    text = re.sub(r"captures\(\w+\) |inreg ", "", text).replace(" addrspace(1)", "")
    parameters = ", ".join(f"{kind} %{place}" for place, kind in enumerate(types))
    text = _KERNEL.sub(f"define internal void @{kernel[1]}({parameters}, {_PROGRAM}) {{", text)
    for intrinsic, value in _IDS.items():
        call = rf"(?:tail )?call [^@]*@llvm\.amdgcn\.{re.escape(intrinsic)}\(\)(?: #\d+)?"
        text = re.sub(call, f"add i32 %{value}, 0", text)
    text = _NAN.sub(lambda found: f"{found[1]} {_nan(found[1], found[2] == '-', int(found[3] or '0', 16))}", text)
    text = _FP32_BITS.sub(lambda found: _fp32(struct.unpack("!f", bytes.fromhex(found[1]))[0]), text)
    text = _FP32_LINE.sub(lambda line: _DECIMAL.sub(lambda found: _fp32(float(found[0])), line[0]), text)
    for theirs, ours in _SAME.items():
        if theirs in text:
            text = text.replace(theirs, ours) + f"\ndeclare float @{ours}(float)\n"
    text = with_exchanges(text)
    foreign = sorted(set(re.findall(r"@(llvm\.amdgcn\.[\w.]+)|(addrspace\(\d\))", text)))
    if foreign:
        raise Unreadable(f"{kernel[1]} needs {foreign}")
    return text + _TO_BF16 + run_of(kernel[1], types), types


# Newer LLVMs also accept an fp32's bits and its shortest decimal, llvmlite's only a decimal that is exact in binary.
_FP32_BITS = re.compile(r"\bf0x([0-9A-F]{8})\b")
_FP32_LINE = re.compile(r"^(?!.*\b(?:double|half|bfloat)\b).*\bfloat\b.*$", re.MULTILINE)
_DECIMAL = re.compile(r"-?\b\d+\.\d+e[+-]\d+\b")


def _fp32(value: float) -> str:
    """Written as the bits of the double with the same value."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', ctypes.c_float(value).value))[0]:016X}"


def _nan(kind: str, is_negative: bool, payload: int) -> str:
    if kind == "float":  # written as the double of the same value
        return f"0x{(0xFFF8 if is_negative else 0x7FF8) << 48 | payload << 29:016X}"
    prefix, quiet, sign = _NAN_BITS[kind]
    return f"{prefix}{quiet | payload | (sign if is_negative else 0):04X}"


_C_TYPES = {"ptr": ctypes.c_void_p, "float": ctypes.c_float, "i32": ctypes.c_int32, "i64": ctypes.c_int64}


class Program:
    """A kernel's code for this CPU.

    Attributes:
        types: the kernel's parameter types in LLVM's terms.
    """

    def __init__(self, text: str) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.load_library_permanently("libm.so.6")
        code, self.types = for_cpu(text)
        try:
            module = llvm.parse_assembly(code)
            module.verify()
        except RuntimeError as error:
            raise Unreadable(f"llvmlite: {error}") from error
        machine = llvm.Target.from_default_triple().create_target_machine(opt=2, features="+avx2,+f16c")
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        numbers = [_C_TYPES[kind] for kind in self.types] + [ctypes.c_int32] * 3 + [ctypes.c_void_p]
        self._run = ctypes.CFUNCTYPE(None, *numbers)(self._engine.get_function_address("run"))

    def run(self, values: Sequence[Any], grid: Sequence[int], num_threads: int, threads: Threads) -> None:
        """Runs all programs of a grid."""
        threads.begin(num_threads, self._engine.get_function_address("thread_of_all"))
        values = [*values, *[None] * (len(self.types) - len(values))]  # scratch memory, which is never requested
        self._run(*values, *(*grid, 1)[:2], num_threads, threads.contexts)


@contextmanager
def launches_run() -> Iterator[set[str]]:
    """Inside, launching a kernel on CPU tensors compiles it for gfx942 and runs the code; yields the kernels' names."""
    from triton.backends.amd.compiler import HIPBackend
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    def named(source: str, metadata: dict[str, Any], options: Any) -> str:
        """Replaces the assembler, which takes half of a compilation: Triton only uses the name from its output."""
        kernel = _KERNEL.search(source)
        metadata["name"] = kernel[1] if kernel else ""
        return ""

    compile_only = JITFunction.run
    programs: dict[str, Program] = {}
    names: set[str] = set()
    threads = Threads()

    def compile_and_run(kernel: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Any:
        result = compile_only(kernel, *args, grid=grid, warmup=True, **keywords)
        if result.hash not in programs:
            programs[result.hash] = Program(result.asm["llir"])
        options = {name: value for name, value in keywords.items() if name in kernel.arg_names}
        given = inspect.signature(kernel.fn).bind(*args, **options).arguments
        values = [given[name] for name, kind in result.src.signature.items() if kind != "constexpr"]
        values = [value.data_ptr() if hasattr(value, "data_ptr") else value for value in values]
        programs[result.hash].run(values, grid, result.metadata.num_warps * WARP["hip"], threads)
        names.add(f"{kernel.fn.__module__}.{kernel.fn.__qualname__}")
        return result

    driver.set_active(StandInDriver(GPUTarget(*TARGET, WARP["hip"])))
    with (
        mock.patch.object(JITFunction, "run", compile_and_run),
        mock.patch.object(HIPBackend, "make_amdgcn", staticmethod(named)),
        mock.patch.object(HIPBackend, "make_hsaco", staticmethod(lambda *_: b"")),
    ):
        yield names


def _main(module: str, *names: str) -> None:
    found = {}
    source = importlib.import_module(module)
    with launches_run() as kernels:
        for name in names:
            try:
                source.CASES[name]()
                found[name] = ""
            except Unreadable as error:
                found[name] = f"unreadable: {error}"
            except Exception:
                found[name] = traceback.format_exc()[-3000:]
    sys.stdout.write("\n" + json.dumps(found | {"kernels": " ".join(sorted(kernels))}) + "\n")


if __name__ == "__main__":
    _main(*sys.argv[1:])
