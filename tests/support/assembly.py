"""Figures of a compiled Triton kernel's machine code: NVIDIA's from the disassembler, AMD's from the compiler."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Assembly:
    """Figures of one program.

    Attributes:
        registers: per thread.
        spilled_bytes: stack per thread for spilled registers.
        shared_bytes: per program.
        barriers, atomics, fused: numbers of instructions; `fused` are fused multiply-adds.
        pieces: (is_store, bytes of one instruction) -> number of device memory accesses.
        instructions: all except padding, including slow paths.
        pipes: instructions up to the kernel's end, without subroutines of slow paths, by execution pipe: "issue" is
            all, "fp32", "alu" (integers, comparisons, selections), "special" (roots, reciprocals).
    """

    registers: int = 0
    spilled_bytes: int = 0
    shared_bytes: int = 0
    barriers: int = 0
    atomics: int = 0
    fused: int = 0
    instructions: int = 0
    pieces: dict[tuple[bool, int], int] = field(default_factory=dict)
    pipes: dict[str, int] = field(default_factory=dict)


def assemblies_of(compiled: Sequence[Any], arch: int | str) -> list[Assembly]:
    """`compiled`: what Triton returns for launches, all for one target."""
    if isinstance(arch, int):
        return _of_cubins([(each.asm["cubin"], each.metadata.name, each.metadata.shared) for each in compiled], arch)
    return [of_amd(each.asm["amdgcn"], each.metadata.shared) for each in compiled]


# NVIDIA

_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+ )?([A-Z]\w*)((?:\.\w+)*)", re.MULTILINE)
_ADDRESS = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")
_FP32 = {"FFMA": 1, "FMUL": 1, "FADD": 1, "FFMA2": 2, "FMUL2": 2, "FADD2": 2}
_ALU = (
    "FMNMX FMNMX3 FSEL FSET FSETP I2FP IADD IADD3 IADDM IMNMX ISETP LEA LOP LOP3 PLOP3 PRMT SEL SHF SHL SHR VIADD "
    "VIADDMNMX VIMNMX VIMNMX3"
).split()
_NARROW = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


def _of_cubins(cubins: Sequence[tuple[bytes, str, int]], arch: int) -> list[Assembly]:
    """Assemblies of (cubin, kernel, shared bytes), from the tools that Triton includes.

    All instructions go into one file, because the disassembler takes half a second to start.
    """
    from triton import knobs

    codes = [_instructions(cubin, name) for cubin, name, _ in cubins]
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        target = f"SM{arch}a" if arch >= 90 else f"SM{arch}"
        command = [knobs.nvidia.nvdisasm.path, "--binary", target, "--no-dataflow", "--no-vliw", file.name]
        lines = iter(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())
    found, end = [], 0
    line = next(lines, None)
    for code, (cubin, name, shared) in zip(codes, cubins, strict=True):
        end += len(code)
        mine = []
        while line is not None and ((at := _ADDRESS.match(line)) is None or int(at[1], 16) < end):
            mine.append(line)
            line = next(lines, None)
        found.append(of_sass("\n".join(mine), *_resources(cubin, name), shared))
    return found


def _instructions(cubin: bytes, name: str) -> bytes:
    """The kernel's section of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + index * size) for index in range(count)]
    for header in headers:
        start = headers[names][4] + header[0]
        if cubin[start : cubin.index(b"\0", start)] == f".text.{name}".encode():
            return cubin[header[4] : header[4] + header[5]]
    raise AssertionError(f"no instructions of {name}")


def _resources(cubin: bytes, name: str) -> tuple[int, int]:
    """(registers, spilled bytes) per thread."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"Function {re.escape(name)}:\s*REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    assert found is not None, f"cuobjdump does not list {name}: {text[:2000]}"
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def of_sass(text: str, registers: int = 0, spilled: int = 0, shared: int = 0) -> Assembly:
    """Parses a disassembly: `/*0180*/ @P0 LDG.E.128 R4, desc[UR6][R2.64] ;`."""
    kinds: Counter[str] = Counter()
    pieces: Counter[tuple[bool, int]] = Counter()
    for operation, words in _SASS.findall(text):
        kinds[operation] += 1
        if operation in ("LDG", "STG"):
            sizes = [_NARROW[word] for word in words.split(".") if word in _NARROW]
            pieces[operation == "STG", sizes[0] if sizes else 4] += 1
    return Assembly(
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=shared,
        barriers=kinds["BAR"],
        atomics=sum(kinds[name] for name in ("ATOM", "ATOMG", "ATOMS", "RED", "REDG")),
        fused=sum(kinds[name] for name in ("FFMA", "FFMA2", "HFMA2", "DFMA")),
        instructions=sum(kinds.values()) - kinds["NOP"],
        pieces=dict(pieces),
        pipes=_cuda_pipes(text),
    )


def _cuda_pipes(text: str) -> dict[str, int]:
    kinds = Counter(operation for operation, _ in _SASS.findall(text[: text.rfind("EXIT")] + "EXIT ;"))
    return {
        "issue": sum(kinds.values()) - kinds["NOP"],
        "fp32": sum(times * kinds[name] for name, times in _FP32.items()),
        "alu": sum(kinds[name] for name in _ALU),
        "special": kinds["MUFU"],
    }


# AMD

_AMD = re.compile(r"^\t((?:v|s|ds|global|buffer|flat|scratch)_\w+)", re.MULTILINE)
_AMD_MEMORY = re.compile(r"(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_FUSED = re.compile(r"v_(?:pk_)?(?:fma|fmac|fmaak|fmamk)_")
# A vector unit takes four cycles for a wavefront's instruction, and sixteen for one of these.
_AMD_SPECIAL = re.compile(r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos)_f(?:16|32)")
_AMD_BYTES = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


def of_amd(text: str, shared: int = 0) -> Assembly:
    """Parses the compiler's text, whose metadata contain the registers."""

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        assert found is not None, f"no {key} in AMD's assembly"
        return int(found.group(1))

    kinds = Counter(_AMD.findall(text))
    pieces: Counter[tuple[bool, int]] = Counter()
    for operation, count in kinds.items():
        if memory := _AMD_MEMORY.fullmatch(operation):
            kind, size = memory.groups()
            pieces[kind == "store", _AMD_BYTES.get(size, 1 if "byte" in size else 2)] += count
    return Assembly(
        registers=number("vgpr_count"),
        spilled_bytes=number("private_segment_fixed_size") + 4 * number("vgpr_spill_count"),
        shared_bytes=max(shared, number("group_segment_fixed_size")),
        barriers=kinds["s_barrier"],
        atomics=sum(count for name, count in kinds.items() if "_atomic_" in name),
        fused=sum(count for name, count in kinds.items() if _AMD_FUSED.match(name)),
        instructions=sum(kinds.values()) - kinds["s_nop"] - kinds["s_code_end"],
        pieces=dict(pieces),
        pipes={
            "alu": sum(count for name, count in kinds.items() if name.startswith("v_")),
            "special": sum(count for name, count in kinds.items() if _AMD_SPECIAL.match(name)),
        },
    )


# How many programs a processor holds at once: CUDA's occupancy tables and AMD's CDNA 3 guide.

_CUDA_SHARED = {80: 164, 90: 228, 100: 228}  # KiB of a multiprocessor; the driver uses 1 per program
_FULL_CUDA, _FULL_AMD = 64, 32  # warps of a multiprocessor, wavefronts of a compute unit


def occupancy(assembly: Assembly, arch: int | str, num_warps: int) -> float:
    """Share of a processor's warps, in whole programs, that registers and shared memory allow."""
    if isinstance(arch, str):
        warps = 4 * min(8, 512 // _up(assembly.registers, 8))
        programs = warps // num_warps
        if assembly.shared_bytes:
            programs = min(programs, (64 << 10) // assembly.shared_bytes)
        return programs * num_warps / _FULL_AMD
    warps = 4 * min(16, 16384 // (32 * _up(assembly.registers, 8)))
    programs = min(warps // num_warps, 32, (_CUDA_SHARED[arch] << 10) // (assembly.shared_bytes + 1024))
    return programs * num_warps / _FULL_CUDA


def _up(number: int, multiple: int) -> int:
    return max(1, -(-number // multiple)) * multiple
