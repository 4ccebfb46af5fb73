"""Memory accesses of a compiled Triton kernel, read from the compiler's output.

TTIR               the argument of every load and store, and the number of its elements that a program touches
machine code       bytes of one instruction, registers, barriers and more (tests/support/assembly.py)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.assembly import Assembly

PIECE_BYTES = 16  # the largest access of one instruction of a thread, on all targets
PIECE_ELEMENTS = 4  # minimum per thread: 16 bytes of fp32, 8 of 16-bit numbers


@dataclass(frozen=True)
class Access:
    """One load or store of a program: the argument, the number of its elements, and bytes per element."""

    argument: str
    is_store: bool
    elements: int  # 0: a scalar that all threads share
    element_bytes: int


@dataclass(frozen=True)
class Machine:
    """One compiled kernel.

    Attributes:
        accesses: in program order; only those outside loops.
        threads: per program.
    """

    accesses: list[Access] = field(default_factory=list)
    assembly: Assembly = field(default_factory=Assembly)
    threads: int = 128

    @property
    def elements(self) -> int:
        """Length of the longest vector that a program touches; 0 if there is none."""
        return max((access.elements for access in self.accesses), default=0)


def read_machine(compiled: Any, assembly: Assembly, warp: int) -> Machine:
    """`compiled`: what Triton returns for a launch."""
    return Machine(
        accesses=list(accesses(compiled.asm["ttir"])),
        assembly=assembly,
        threads=compiled.metadata.num_warps * warp,
    )


_RESULT = re.compile(r"^\s*(%[\w$.]+)(?::\d+)? = (.*)$")
_LOAD_STORE = re.compile(r"tt\.(load|store) (%[\w$.]+).* : (.*?)(?: loc\(.*)?$")
_TENSOR = re.compile(r"tensor<((?:\d+x)+)!tt\.ptr<(\w+)>")
_BITS = re.compile(r"\d+")


def accesses(ttir: str) -> Iterator[Access]:
    """Loads and stores in Triton's IR, with the argument that their pointers come from."""
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


# What a kernel's docstring states about its memory accesses, compared with the compiled code.

_READS = re.compile(r"Reads ([^:;]*?)(?:; writes ([^:]*?))?: ([\d.]+) bytes per element \(([^)]*)\)")
_BUT_FOR = re.compile(r"In pieces of four elements but for ([^:]*):")


@dataclass(frozen=True)
class Words:
    """A docstring's statements: arguments read and written, bytes per element of the common case, exceptions."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    num_bytes: float
    narrower: tuple[str, ...]


def words_of(docstring: str, arguments: set[str]) -> Words | None:
    """None if the docstring does not mention elements: a kernel that processes a few numbers."""
    text = " ".join(docstring.split())
    found, but = _READS.search(text), _BUT_FOR.search(text)
    if found is None:
        return None

    def named(part: str | None) -> tuple[str, ...]:
        return tuple(word for word in re.findall(r"\w+", part or "") if word in arguments)

    return Words(named(found[1]), named(found[2]), float(found[3]), named(but[1] if but else None))


def bytes_per_element(machine: Machine) -> float:
    """Bytes per element of the longest vector, for all vectors of a program."""
    return sum(access.elements * access.element_bytes for access in machine.accesses) / machine.elements


def complaints(machine: Machine, words: Words | None, *, is_aligned: bool) -> list[str]:
    """Where the compiled program contradicts its docstring."""
    spilled = machine.assembly.spilled_bytes
    found = [f"{spilled} bytes of registers are spilled"] if spilled else []
    if words is None:
        return found
    for is_store, said in ((False, words.reads), (True, words.writes)):
        vectors = [access for access in machine.accesses if access.elements and access.is_store == is_store]
        seen = Counter(access.argument for access in vectors)
        verb = "stored" if is_store else "loaded"
        found += [f"{name} is {verb} {count} times" for name, count in seen.items() if count > 1 and name in said]
        found += [f"{name} is {verb}, which its docstring does not say" for name in seen if name not in said]
    return [*found, *(_too_narrow(machine, words) if is_aligned else [])]


def _too_narrow(machine: Machine, words: Words) -> Iterator[str]:
    """Accesses of a thread in smaller pieces than `PIECE_ELEMENTS` of their numbers."""
    meant: Counter[int] = Counter()
    for access in machine.accesses:
        if access.argument not in words.narrower:
            piece = min(PIECE_BYTES, PIECE_ELEMENTS * access.element_bytes)
            meant[piece] += access.elements * access.element_bytes // machine.threads
    for piece in meant:
        expected = sum(number for size, number in meant.items() if size >= piece)
        wide = sum(size * count for (_, size), count in machine.assembly.pieces.items() if size >= piece)
        if wide < expected:
            yield f"{wide} of {expected} bytes of a thread move in pieces of {piece}: {machine.assembly.pieces}"
