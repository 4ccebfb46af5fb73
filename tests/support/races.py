"""Detects data races between the programs of a Triton kernel, from the addresses that its interpreter accesses.

On a GPU programs run concurrently in any order. So no element may be written by two programs, or be read by one and
written by another, and the result must be bitwise independent of the order. Besides, every access must stay within one
of the kernel's tensors: a vector may start where another one ends, so an element too many is the neighbour's and causes
no memory error.

Atomic operations may conflict: the order of those shows in the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor


class Log:
    """The accesses of one launch; replaces the interpreter's module for memory."""

    def __init__(self, memory: Any, tensors: dict[str, Tensor]) -> None:
        """`memory`: that module; `tensors`: the arguments by name."""
        self._memory = memory
        self._extents = {name: _extent(tensor) for name, tensor in tensors.items()}
        self._accesses: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"read": [], "written": []}
        self.program = 0
        self.outside: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def load(self, addresses: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> Any:
        mask = self._inside("read", addresses, mask, np.dtype(dtype).itemsize)
        return self._memory.load(addresses, mask, other, dtype)

    def store(self, addresses: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        mask = self._inside("written", addresses, mask, value.dtype.itemsize)
        return self._memory.store(addresses, value, mask)

    def _inside(self, verb: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
        """The mask without elements outside of the tensor that most elements are in; those are recorded."""
        places = addresses.astype(np.int64)
        inside = {
            name: mask & (places >= start) & (places + size <= end) for name, (start, end) in self._extents.items()
        }
        name = max(inside, key=lambda name: int(inside[name].sum()))
        wrong = places[mask & ~inside[name]]
        if wrong.size:
            at = (int(wrong[0]) - self._extents[name][0]) // size
            self.outside.append(f"program {self.program}: element {at} of {name}, which has none there, is {verb}")
        every_byte = (places[inside[name]][:, None] + np.arange(size)).ravel()
        self._accesses[verb].append((every_byte, np.full(every_byte.size, self.program)))
        return inside[name]

    def conflicts(self) -> Iterator[str]:
        """Elements that one program writes and another one writes or reads."""
        if not self._accesses["written"]:
            return
        places, programs = _joined(self._accesses["written"])
        twice = np.flatnonzero((places[1:] == places[:-1]) & (programs[1:] != programs[:-1]))
        if twice.size:
            both = f"{programs[twice[0]]} and {programs[twice[0] + 1]}"
            yield f"programs {both} write {self._named(places[twice[0]])}"
        if self._accesses["read"]:
            read, readers = _joined(self._accesses["read"])
            found = np.minimum(np.searchsorted(places, read), places.size - 1)
            across = np.flatnonzero((places[found] == read) & (programs[found] != readers))
            if across.size:
                place = across[0]
                both = f"program {readers[place]} reads what program {programs[found[place]]} writes"
                yield f"{both}: {self._named(read[place])}"

    def _named(self, address: int) -> str:
        held = (name for name, (start, end) in self._extents.items() if start <= address < end)
        name = next(held)  # accesses outside of all tensors were not recorded
        return f"{name}, byte {address - self._extents[name][0]}"


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a view, and the byte after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size() * (tensor.numel() > 0)


def _joined(accesses: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """(sorted addresses, their programs), every pair once."""
    pairs = np.stack([np.concatenate(parts) for parts in zip(*accesses, strict=True)])
    order = np.lexsort(pairs[::-1])
    pairs = pairs[:, order]
    fresh = np.append(True, (pairs[:, 1:] != pairs[:, :-1]).any(axis=0))
    return pairs[0, fresh], pairs[1, fresh]


@contextmanager
def launches_watched(seed: int) -> Iterator[dict[str, list[str]]]:
    """Errors by kernel: inside, every launch under the interpreter runs in order, and again in another order.

    Vectors of zeros are filled with random numbers first.
    """
    from triton.runtime import interpreter

    run = interpreter.InterpretedFunction.run
    builder = interpreter.interpreter_builder
    memory, set_place = interpreter._interpreter, builder.set_grid_idx
    random = np.random.default_rng(seed)
    found: dict[str, list[str]] = {}

    def watched(kernel: Any, *args: Any, grid: Any, **keywords: Any) -> None:
        given = zip(kernel.arg_names, args, strict=False)  # compile-time constants are passed by keyword
        tensors = {name: value for name, value in given if isinstance(value, Tensor)}
        for tensor in tensors.values():
            if tensor.is_floating_point() and not tensor.any():
                tensor.uniform_()
        shape = (*grid, 1, 1)[:3]
        order = random.permutation(np.prod(shape))
        if (order == np.arange(order.size)).all():
            order = order[::-1]
        storages = [torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()) for tensor in tensors.values()]
        before = [storage.clone() for storage in storages]
        log = Log(memory, tensors)

        def run_in(order: np.ndarray) -> list[Tensor]:
            for storage, bits in zip(storages, before, strict=True):
                storage.copy_(bits)

            def in_order(*place: int) -> None:
                log.program = int(order[np.ravel_multi_index(place, shape)])
                set_place(*map(int, np.unravel_index(log.program, shape)))

            logged = mock.patch.object(interpreter, "_interpreter", log)
            with logged, mock.patch.object(builder, "set_grid_idx", in_order):
                run(kernel, *args, grid=grid, **keywords)
            return [storage.clone() for storage in storages]

        wrong = found.setdefault(kernel.fn.__name__, [])
        results = run_in(np.arange(order.size))
        wrong += [*log.outside, *log.conflicts()]
        if order.size > 1:
            again = run_in(order)
            names = [n for n, one, other in zip(tensors, results, again, strict=True) if not torch.equal(one, other)]
            wrong += [f"{name} depends on the order of programs" for name in names]

    with mock.patch.object(interpreter.InterpretedFunction, "run", watched):
        yield found
