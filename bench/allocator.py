"""Memory that torch's caching allocator reserves for the tensors of a step, in addition to their own size.

A whole step is traced, tensor by tensor (`hf_zero.planning.trace`), and replayed with the allocator's rules
(CUDACachingAllocator.cpp of PyTorch): sizes are rounded up to 512 bytes; blocks up to 1 MiB come from segments of 2
MiB, those up to 10 MiB from segments of 20 MiB, and larger ones have their own, in steps of 2 MiB; the smallest free
block that is large enough is used, and split if enough is left; adjacent free blocks are merged. Nothing is returned to
the driver. With `expandable_segments`, blocks up to 1 MiB are in one segment and all others in another, which grow in
steps of 2 and 20 MiB if the free block at their end is too small.

Parameters stay between steps. Adam's states are allocated in the first update, in free blocks of activations, which the
next step can no longer use. Tensors of other streams (those that FSDP gathers and reduces) are not included.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor, nn

from hf_zero.planning import model, trace

MIB = 2**20
ROUND, SMALL, SMALL_SEGMENT = 512, MIB, 2 * MIB
MEDIUM, MEDIUM_SEGMENT, STEP = 10 * MIB, 20 * MIB, 2 * MIB
STEPS = 3  # the second is the first one with optimizer states


@dataclass(slots=True)
class _Block:
    size: int
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class Allocator:
    """
    Attributes:
        reserved: bytes reserved.
        most: maximum of the bytes in use.
    """

    def __init__(self, *, expandable: bool = False) -> None:
        self.reserved = self.most = self._used = self._count = 0
        self._expandable = expandable
        self._last: dict[bool, _Block] = {}  # last blocks of expandable segments
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}
        self._number: dict[int, int] = {}

    def take(self, num_bytes: int) -> _Block:
        size = max(ROUND, -(-num_bytes // ROUND) * ROUND)
        is_small = size <= SMALL
        free = self._free[is_small]
        index = bisect_left(free, (size, -1))  # type: ignore[type-var]
        block = free.pop(index)[2] if index < len(free) else self._segment(size, is_small=is_small)
        left = block.size - size
        if left >= ROUND if is_small else left > SMALL:
            rest = _Block(left, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            self._now_last(is_small, block, rest)
            self._put(rest, is_small=is_small)
        block.is_free = False
        self._used += block.size
        self.most = max(self.most, self._used)
        return block

    def give(self, block: _Block, num_bytes: int) -> None:
        """`num_bytes`: the requested size."""
        self._used -= block.size
        is_small = num_bytes <= SMALL
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._free[is_small].remove((other.size, self._number.pop(id(other)), other))
                first, second = (other, block) if other is block.before else (block, other)
                first.size, first.after = first.size + second.size, second.after
                if first.after is not None:
                    first.after.before = first
                self._now_last(is_small, second, first)
                block = first
        self._put(block, is_small=is_small)

    def _segment(self, size: int, *, is_small: bool) -> _Block:
        if self._expandable:
            return self._expanded(size, is_small=is_small)
        size = SMALL_SEGMENT if is_small else MEDIUM_SEGMENT if size < MEDIUM else -(-size // STEP) * STEP
        self.reserved += size
        return _Block(size)

    def _expanded(self, size: int, *, is_small: bool) -> _Block:
        last, page = self._last.get(is_small), SMALL_SEGMENT if is_small else MEDIUM_SEGMENT
        at_end = last if last is not None and last.is_free else None
        grown = -(-(size - (at_end.size if at_end is not None else 0)) // page) * page
        self.reserved += grown
        if at_end is not None:
            self._free[is_small].remove((at_end.size, self._number.pop(id(at_end)), at_end))
            at_end.size += grown
            return at_end
        block = self._last[is_small] = _Block(grown, before=last)
        if last is not None:
            last.after = block
        return block

    def _now_last(self, is_small: bool, before: _Block, now: _Block) -> None:
        if self._last.get(is_small) is before:
            self._last[is_small] = now

    def _put(self, block: _Block, *, is_small: bool) -> None:
        self._count += 1
        block.is_free, self._number[id(block)] = True, self._count
        insort(self._free[is_small], (block.size, self._count, block))


Event = tuple[str, int, int]  # "made", "gone" or "gradient"; the storage; its bytes


@contextmanager
def recording() -> Iterator[list[Event]]:
    """Record allocations and deallocations of traces. A later storage may have the number of a freed one."""
    events: list[Event] = []

    class Living(trace._Living):
        def _follow(self, tensor: Tensor, *, counts: bool = True) -> None:
            storage = tensor.untyped_storage()
            is_new = storage._cdata not in self._refs
            super()._follow(tensor, counts=counts)
            if is_new and counts and storage.nbytes():
                events.append(("made", storage._cdata, storage.nbytes()))

        def _gone(self, key: int, size: int) -> None:
            super()._gone(key, size)
            if size:
                events.append(("gone", key, size))

    class Recorder(trace._Recorder):
        def complete(self, parameter: nn.Parameter, name: str) -> None:
            gradient: Any = parameter.grad
            events.append(("gradient", gradient.untyped_storage()._cdata, 0))
            super().complete(parameter, name)

    all_layers = mock.patch.object(model, "_with_layers", side_effect=trace.NotAlike("all are wanted"))
    with mock.patch.object(trace, "_Living", Living), mock.patch.object(trace, "_Recorder", Recorder), all_layers:
        yield events


@dataclass(frozen=True)
class Kept:
    """What a program keeps between steps.

    Attributes:
        weights: bytes of each parameter.
        states: bytes of each tensor that the first update creates.
        temporary: bytes of each temporary tensor of an update.
        keeps_gradients: gradients are kept until the update, each in its own tensor; otherwise they are freed when
            they have been reduced.
        zeroes_gradients: gradients are kept after the update.
        micro_batches: micro-batches per update.
    """

    weights: Sequence[int]
    states: Sequence[int] = ()
    temporary: Sequence[int] = ()
    keeps_gradients: bool = True
    zeroes_gradients: bool = False
    micro_batches: int = 1


def holes(events: Sequence[Event], kept: Kept, *, expandable: bool = False) -> int:
    """Return the bytes that the allocator has reserved beyond the maximum in use."""
    allocator = Allocator(expandable=expandable)
    for size in kept.weights:
        allocator.take(size)
    gradients: dict[int, tuple[_Block, int]] = {}
    for step in range(STEPS):
        for _ in range(min(2, kept.micro_batches)):
            _play(allocator, events, gradients if kept.keeps_gradients else None)
        for size in kept.states if step == 0 else ():
            allocator.take(size)
        for block, size in [(allocator.take(size), size) for size in kept.temporary]:
            allocator.give(block, size)
        if not kept.zeroes_gradients:
            for block, size in gradients.values():
                allocator.give(block, size)
            gradients.clear()
    return allocator.reserved - allocator.most


def _play(allocator: Allocator, events: Sequence[Event], gradients: dict[int, tuple[_Block, int]] | None) -> None:
    """Replay one forward and backward; `gradients`: gradients that are kept, in the order of completion."""
    here: dict[int, tuple[_Block, int]] = {}
    number: dict[int, int] = {}
    for kind, key, size in events:
        if kind == "made":
            here[key] = allocator.take(size), size
        elif kind == "gradient":
            number[key] = len(number)
        elif key in here:
            _end(allocator, *here.pop(key), number.pop(key, -1), gradients)
    for key, (block, size) in here.items():
        _end(allocator, block, size, number.pop(key, -1), gradients)


def _end(
    allocator: Allocator, block: _Block, size: int, gradient: int, gradients: dict[int, tuple[_Block, int]] | None
) -> None:
    """Free a tensor, unless it is a gradient that is kept; `gradient`: its number, or -1."""
    if gradients is not None and gradient >= 0 and gradient not in gradients:
        gradients[gradient] = block, size
    else:
        allocator.give(block, size)
