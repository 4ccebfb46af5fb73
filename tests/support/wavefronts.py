"""Simulates AMD's wavefronts on a CPU: a program's threads take turns, and switch where they exchange values.

Each thread has its own stack (`makecontext`). Where it exchanges values with others, or waits for them, it stores its
value and switches to the next thread; at its next turn all threads have done so. The effect is the same as lockstep,
and needs no knowledge of the code in between.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Sequence
from itertools import count
from typing import Any

WAVE = 64
MAX_THREADS = 1024
_CONTEXT_BYTES, _STACK_BYTES = 8192, 1 << 16
_SHARED_BYTES = 1 << 16
_TYPES = {"i32": "i32", "i64": "i64", "f32": "float", "f64": "double"}


class Unreadable(Exception):
    """Code that cannot be run here."""


# Data parallel primitives (CDNA 3 ISA, section 13): the thread that each thread reads from, in rows of 16.

_KEPT, _ZEROED = -1, -2


def dpp_sources(control: int, rows: int, banks: int, *, zeroes: bool) -> list[int]:
    """The source of each thread of a wavefront; _KEPT: its old value, _ZEROED: 0."""

    def source(thread: int) -> int:
        row, place = thread & ~15, thread & 15
        if not (rows >> (thread // 16) & 1 and banks >> (place // 4) & 1):
            return _KEPT
        found = _moved(control, row, place)
        return found if found is not None else _ZEROED if zeroes else _KEPT

    return [source(thread) for thread in range(WAVE)]


def _moved(control: int, row: int, place: int) -> int | None:
    by = control & 15
    if control < 0x100:  # a permutation within each four
        return row + (place & ~3) + (control >> 2 * (place & 3) & 3)
    if 0x101 <= control <= 0x10F:
        return row + place + by if place + by < 16 else None
    if 0x111 <= control <= 0x11F:
        return row + place - by if place >= by else None
    if 0x121 <= control <= 0x12F:
        return row + (place - by) % 16
    if control == 0x141:
        return row + (place ^ 7)
    if control == 0x142:  # the last of each row to the next row
        return row - 1 if row else None
    if control == 0x143:
        return 31 if row >= 32 else None
    raise Unreadable(f"a movement {control:#x} between threads")


def swizzle_sources(pattern: int) -> list[int]:
    """The same for ds_swizzle: a permutation within each four, or masks within each 32."""
    if pattern & 0x8000:
        return dpp_sources(pattern & 0xFF, 15, 15, zeroes=False)
    keep, put, flip = (pattern >> shift & 31 for shift in (0, 5, 10))
    return [(thread & ~31) + ((thread & keep | put) ^ flip) for thread in range(WAVE)]


# LLVM's code

_CALL = re.compile(r"call ([^@(]*?)@llvm\.amdgcn\.([\w.]+)\(([^()]*)\)(?: #\d+)?")
_DPP = re.compile(r"(.*), i32 (\d+), i32 (\d+), i32 (\d+), i1 (true|false)")
_WAITS = re.compile(r"^  (?:fence |.*@llvm\.amdgcn\.s\.waitcnt\().*\n", re.MULTILINE)
_SHARED = re.compile(r"^@global_smem = .*$", re.MULTILINE)
# AMD's name -> ours.
_OURS = {
    "s.barrier": "wait",
    "wave.barrier": "wait",
    "workitem.id.x": "number",
    "ds.bpermute": "bpermute",
    **{f"readlane.{kind}": f"read.{kind}" for kind in _TYPES},
    "readfirstlane.i32": "first",
}

_TURNS = f"""
@thread = internal global i32 0
@threads = internal global i32 0
@contexts = internal global ptr null
@met = internal global [{MAX_THREADS} x i32] zeroinitializer
@at = internal global [{2 * MAX_THREADS} x i32] zeroinitializer
@given = internal global [{2 * MAX_THREADS} x i64] zeroinitializer
declare i32 @swapcontext(ptr, ptr)
declare void @abort() noreturn

define internal ptr @context(i32 %thread) {{
  %contexts = load ptr, ptr @contexts
  %offset = mul i32 %thread, {_CONTEXT_BYTES}
  %context = getelementptr i8, ptr %contexts, i32 %offset
  ret ptr %context
}}
define internal i32 @following() {{
  %thread = load i32, ptr @thread
  %threads = load i32, ptr @threads
  %one_more = add i32 %thread, 1
  %is_last = icmp eq i32 %one_more, %threads
  %next = select i1 %is_last, i32 0, i32 %one_more
  ret i32 %next
}}
; The buffer of this exchange. Some threads may be here while others still read the values of the previous one.
define internal i32 @side() {{
  %thread = load i32, ptr @thread
  %counter = getelementptr i32, ptr @met, i32 %thread
  %count = load i32, ptr %counter
  %odd = and i32 %count, 1
  %side = mul i32 %odd, {MAX_THREADS}
  ret i32 %side
}}
; A barrier: all threads come here, at the same place of the code.
define internal void @meet(i32 %place) noinline {{
  %thread = load i32, ptr @thread
  %next = call i32 @following()
  %side = call i32 @side()
  %index = add i32 %side, %thread
  %mark = getelementptr i32, ptr @at, i32 %index
  store i32 %place, ptr %mark
  %counter = getelementptr i32, ptr @met, i32 %thread
  %count = load i32, ptr %counter
  %more = add i32 %count, 1
  store i32 %more, ptr %counter
  store i32 %next, ptr @thread
  %from = call ptr @context(i32 %thread)
  %to = call ptr @context(i32 %next)
  call i32 @swapcontext(ptr %from, ptr %to)
  %index_of_next = add i32 %side, %next
  %mark_of_next = getelementptr i32, ptr @at, i32 %index_of_next
  %place_of_next = load i32, ptr %mark_of_next
  %is_same = icmp eq i32 %place, %place_of_next
  br i1 %is_same, label %together, label %apart
apart:
  call void @abort()
  unreachable
together:
  ret void
}}
define internal void @threads.wait(i32 %place) {{
  call void @meet(i32 %place)
  ret void
}}
define internal i32 @threads.number(i32 %place) {{
  %thread = load i32, ptr @thread
  ret i32 %thread
}}
define internal i32 @threads.first(i32 %place, i32 %value) {{
  %result = call i32 @threads.read.i32(i32 %place, i32 %value, i32 0)
  ret i32 %result
}}
define internal i32 @threads.bpermute(i32 %place, i32 %bytes, i32 %value) {{
  %shifted = lshr i32 %bytes, 2
  %lane = and i32 %shifted, {WAVE - 1}
  %result = call i32 @threads.read.i32(i32 %place, i32 %value, i32 %lane)
  ret i32 %result
}}
"""
_READ = """
define internal {type} @threads.read.{name}(i32 %place, {type} %value, i32 %source) {{
  %thread = load i32, ptr @thread
  %side = call i32 @side()
  %own = add i32 %side, %thread
  %mine = getelementptr i64, ptr @given, i32 %own
  store {type} %value, ptr %mine
  call void @meet(i32 %place)
  %wave = and i32 %own, -{wave}
  %other = or i32 %wave, %source
  %theirs = getelementptr i64, ptr @given, i32 %other
  %result = load {type}, ptr %theirs
  ret {type} %result
}}
define internal {type} @threads.dpp.{name}(i32 %place, {type} %old, {type} %value, ptr %sources) {{
  %thread = load i32, ptr @thread
  %lane = and i32 %thread, {last}
  %entry = getelementptr i32, ptr %sources, i32 %lane
  %source = load i32, ptr %entry
  %inside = and i32 %source, {last}  ; of what is no thread's number, any
  %read = call {type} @threads.read.{name}(i32 %place, {type} %value, i32 %inside)
  %is_zero = icmp eq i32 %source, {zeroed}
  %or_zero = select i1 %is_zero, {type} {zero}, {type} %read
  %is_old = icmp eq i32 %source, {kept}
  %result = select i1 %is_old, {type} %old, {type} %or_zero
  ret {type} %result
}}
"""
_GRID = (("i32", "width"), ("i32", "height"))
_RUN = """
{globals}
define void @run({parameters}, i32 %width, i32 %height, i32 %threads, ptr %contexts) {{
  store i32 %width, ptr @width
  store i32 %height, ptr @height
  store i32 %threads, ptr @threads
  store ptr %contexts, ptr @contexts
  store i32 0, ptr @thread
  {stores}
  %first = call ptr @context(i32 0)
  %caller = call ptr @context(i32 %threads)
  call i32 @swapcontext(ptr %caller, ptr %first)
  ret void
}}
; One thread's part of all programs, one after the other.
define void @thread_of_all() {{
entry:
  %width = load i32, ptr @width
  %height = load i32, ptr @height
  {loads}
  br label %loop
loop:
  %x = phi i32 [ 0, %entry ], [ %next_x, %loop ]
  %y = phi i32 [ 0, %entry ], [ %next_y, %loop ]
  call void @{name}({arguments}, i32 %x, i32 %y)
  call void @meet(i32 -1)
  %x1 = add i32 %x, 1
  %is_last_x = icmp eq i32 %x1, %width
  %next_x = select i1 %is_last_x, i32 0, i32 %x1
  %step_y = zext i1 %is_last_x to i32
  %next_y = add i32 %y, %step_y
  %is_over = icmp eq i32 %next_y, %height
  br i1 %is_over, label %end, label %loop
end:
  %thread = load i32, ptr @thread
  %next = add i32 %thread, 1
  store i32 %next, ptr @thread
  ret void
}}
"""


def with_exchanges(text: str) -> str:
    """Replaces calls of AMD's exchanges between threads by the above functions, which are added to the code."""
    places = count()
    tables: list[str] = []

    def table(sources: list[int]) -> str:
        entries = ", ".join(f"i32 {source}" for source in sources)
        tables.append(f"@sources.{len(tables)} = internal constant [{WAVE} x i32] [{entries}]")
        return f"@sources.{len(tables) - 1}"

    def replaced(found: re.Match[str]) -> str:
        result, name, arguments = found.groups()
        ours, kind = _OURS.get(name), name.rpartition(".")[2]
        if name.startswith("update.dpp") and (moved := _DPP.fullmatch(arguments)):
            values, *numbers, zeroes = moved.groups()
            sources = dpp_sources(*map(int, numbers), zeroes=zeroes == "true")
            ours, arguments = f"dpp.{kind}", f"{values}, ptr {table(sources)}"
        if name == "ds.swizzle":
            value, pattern = arguments.split(", i32 ")
            ours, arguments = "dpp.i32", f"{value}, {value}, ptr {table(swizzle_sources(int(pattern)))}"
        if ours is None:
            return found[0]
        return f"call {result}@threads.{ours}(i32 {next(places)}{arguments and ', '}{arguments})"

    text = _SHARED.sub(f"@global_smem = internal global [{_SHARED_BYTES} x i8] zeroinitializer, align 16", text)
    # Waits for memory are not needed here.
    text = _WAITS.sub("", text.replace(" addrspace(3)", ""))
    numbers = {"wave": WAVE, "last": WAVE - 1, "kept": _KEPT, "zeroed": _ZEROED}
    reads = (
        _READ.format(name=name, type=kind, zero="0.0" if name[0] == "f" else "0", **numbers)
        for name, kind in _TYPES.items()
    )
    return "\n".join([_CALL.sub(replaced, text), *tables, _TURNS, *reads])


def run_of(kernel: str, types: Sequence[str]) -> str:
    """The code that runs all threads of all programs of a kernel whose last parameters are the program's x and y."""
    numbered = [(kind, f"a{place}") for place, kind in enumerate(types)]
    parameters = ", ".join(f"{kind} %{name}" for kind, name in numbered)
    return _RUN.format(
        name=kernel,
        globals="\n".join(f"@{name} = internal global {kind} zeroinitializer" for kind, name in (*numbered, *_GRID)),
        parameters=parameters,
        stores="\n  ".join(f"store {kind} %{name}, ptr @{name}" for kind, name in numbered),
        loads="\n  ".join(f"%{name} = load {kind}, ptr @{name}" for kind, name in numbered),
        arguments=parameters,
    )


# Threads


class _Context(ctypes.Structure):
    """The beginning of C's ucontext_t, which is the same on all processors under Linux."""

    _fields_ = [
        ("flags", ctypes.c_ulong),
        ("following", ctypes.c_void_p),
        ("stack", ctypes.c_void_p),
        ("stack_flags", ctypes.c_int),
        ("stack_bytes", ctypes.c_size_t),
    ]


class Threads:
    """Stacks and registers for the largest number of threads of a program; initial contexts are created per launch."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, (MAX_THREADS + 1) * (_CONTEXT_BYTES + _STACK_BYTES))
        self.contexts = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._stacks = self.contexts + (MAX_THREADS + 1) * _CONTEXT_BYTES
        self._c: Any = ctypes.CDLL(None)

    def begin(self, threads: int, address: int) -> None:
        """The threads call the function at `address` in turn; the last one returns to the caller of `run`."""
        for thread in range(threads):
            at = self.contexts + thread * _CONTEXT_BYTES
            self._c.getcontext(ctypes.c_void_p(at))
            context = _Context.from_address(at)
            context.following = at + _CONTEXT_BYTES
            context.stack, context.stack_bytes = self._stacks + thread * _STACK_BYTES, _STACK_BYTES
            self._c.makecontext(ctypes.c_void_p(at), ctypes.c_void_p(address), 0)
