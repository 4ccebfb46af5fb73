"""What a compiled Triton kernel does to memory, read from the compiler's own output.

TTIR         which argument every load and store goes to, and how many elements of it a program touches
PTX          how many bytes one instruction moves
cubin, AMD's assembly       registers, and what did not fit into them
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PIECE_BYTES = 16  # the most that one instruction of a thread moves on all targets


@dataclass(frozen=True)
class Access:
    """One load or store of a program: the argument, how many of its elements, bytes of one."""

    argument: str
    is_store: bool
    elements: int  # 0: a single number that all threads share
    element_bytes: int


@dataclass(frozen=True)
class Machine:
    """One compiled kernel.

    Attributes:
        accesses: in the order of the program; only those outside loops.
        pieces: (is_store, bytes) of an instruction -> how many a thread has; empty where nobody reads the assembly.
        spilled_bytes: stack of a thread, on which lie the registers that were too few.
        threads: of one program.
    """

    accesses: list[Access] = field(default_factory=list)
    pieces: dict[tuple[bool, int], int] = field(default_factory=dict)
    registers: int = 0
    spilled_bytes: int = 0
    threads: int = 128


def read_machine(compiled: Any, warp: int) -> Machine:
    """`compiled`: what Triton returns for a launch."""
    asm, name = compiled.asm, compiled.metadata.name
    registers, spilled = _of_cubin(asm["cubin"], name) if "cubin" in asm else _of_amd(asm["amdgcn"])
    return Machine(
        accesses=list(accesses(asm["ttir"])),
        pieces=dict(pieces(asm.get("ptx", ""))),
        registers=registers,
        spilled_bytes=spilled,
        threads=compiled.metadata.num_warps * warp,
    )


_RESULT = re.compile(r"^\s*(%[\w$.]+)(?::\d+)? = (.*)$")
_LOAD_STORE = re.compile(r"tt\.(load|store) (%[\w$.]+).* : (.*?)(?: loc\(.*)?$")
_TENSOR = re.compile(r"tensor<((?:\d+x)+)!tt\.ptr<(\w+)>")
_BITS = re.compile(r"\d+")


def accesses(ttir: str) -> Iterator[Access]:
    """Loads and stores in Triton's own representation, with the argument that their pointers come from."""
    came_from: dict[str, str] = {}
    for line in ttir.splitlines():
        if line.lstrip().startswith("tt.func"):
            came_from |= {f"%{name}": name for name in re.findall(r"%(\w+): !tt\.ptr", line)}
            continue
        result = _RESULT.match(line)
        operation = result.group(2) if result else line.strip()
        first = re.search(r"%[\w$.]+", operation)
        if result and first and first.group() in came_from:
            came_from[result.group(1)] = came_from[first.group()]
        found = _LOAD_STORE.search(operation)
        if found:
            kind, pointer, types = found.groups()
            tensor = _TENSOR.search(types)
            shape, element = tensor.groups() if tensor else ("", re.findall(r"ptr<(\w+)>", types)[0])
            elements = 1 if tensor else 0
            for size in shape.split("x")[:-1]:
                elements *= int(size)
            bits = _BITS.search(element)
            assert bits is not None, f"a pointer to {element}"
            yield Access(came_from.get(pointer, pointer), kind == "store", elements, max(1, int(bits.group()) // 8))


def pieces(ptx: str) -> Counter[tuple[bool, int]]:
    """(is_store, bytes of one instruction) -> number, of loads and stores in device memory."""
    found: Counter[tuple[bool, int]] = Counter()
    for kind, vector, bits in re.findall(r"\b(ld|st)\.global(?:\.[a-z]\w*(?<!v\d))*?(?:\.v(\d))?\.[busf](\d+)", ptx):
        found[kind == "st", int(vector or 1) * int(bits) // 8] += 1
    return found


def _of_cubin(cubin: bytes, name: str) -> tuple[int, int]:
    """(registers, bytes of stack), by the program that Triton brings along for it."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(rf"Function {re.escape(name)}:\s*REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", text)
    assert found is not None, f"cuobjdump says nothing of {name}: {text}"
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _of_amd(assembly: str) -> tuple[int, int]:
    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", assembly)
        assert found is not None, f"no {key} in AMD's assembly"
        return int(found.group(1))

    spilled = number("vgpr_spill_count") + number("sgpr_spill_count")
    return number("vgpr_count"), number("private_segment_fixed_size") + 4 * spilled


# What a kernel's docstring says of its memory, against what the compiler made of it.

_READS = re.compile(r"Reads ([^:;]*?)(?:; writes ([^:]*?))?: ([\d.]+) bytes per element \(([^)]*)\)")
_BUT_FOR = re.compile(r"In pieces of 16 bytes but for ([^:]*):")


@dataclass(frozen=True)
class Words:
    """What a docstring says: arguments read and written, bytes per element of the common case, exceptions."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    num_bytes: float
    narrower: tuple[str, ...]


def words_of(docstring: str, arguments: set[str]) -> Words | None:
    """None where the docstring does not speak of elements: a kernel that works on a few numbers."""
    text = " ".join(docstring.split())
    found, but = _READS.search(text), _BUT_FOR.search(text)
    if found is None:
        return None

    def named(part: str | None) -> tuple[str, ...]:
        return tuple(word for word in re.findall(r"\w+", part or "") if word in arguments)

    return Words(named(found[1]), named(found[2]), float(found[3]), named(but[1] if but else None))


def bytes_per_element(machine: Machine) -> float:
    """All vectors of a program; the longest has an element for each."""
    vectors = [access for access in machine.accesses if access.elements]
    elements = max(access.elements for access in vectors)
    return sum(access.elements * access.element_bytes for access in vectors) / elements


def complaints(machine: Machine, words: Words | None, *, is_aligned: bool) -> list[str]:
    """Where the compiled program is not as its docstring has it."""
    found = [f"{machine.spilled_bytes} bytes of registers are spilled"] if machine.spilled_bytes else []
    if words is None:
        return found
    for is_store, said in ((False, words.reads), (True, words.writes)):
        vectors = [access for access in machine.accesses if access.elements and access.is_store == is_store]
        seen = Counter(access.argument for access in vectors)
        verb = "stored" if is_store else "loaded"
        found += [f"{name} is {verb} {count} times" for name, count in seen.items() if count > 1 and name in said]
        found += [f"{name} is {verb}, which its docstring does not say" for name in seen if name not in said]
    if is_aligned and machine.pieces:
        wide = sum(size * count for (_, size), count in machine.pieces.items() if size >= PIECE_BYTES)
        meant = [access for access in machine.accesses if access.elements and access.argument not in words.narrower]
        expected = sum(access.elements * access.element_bytes for access in meant) // machine.threads
        if wide < expected:
            found.append(f"{wide} of {expected} bytes of a thread move in pieces of {PIECE_BYTES}: {machine.pieces}")
    return found
