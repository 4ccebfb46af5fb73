"""A device whose memory is an arena with a limit, to simulate a small GPU on a laptop.

It computes on the CPU, and its copies are immediate. Every tensor counts as device memory from its creation until it is
freed, except for what the engine creates in host memory: homes, and tensors of updates on the host. Exceeding the limit
raises.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zero.device.runtime import HOST, Memory, Runtime

_ON_HOST = ("/hf_zero/optim/", "/hf_zero/offload/split_masters.py")  # operate on host memory


class OutOfArena(RuntimeError):
    """The arena's limit was exceeded."""


class ArenaDevice(Runtime):
    """A CPU device whose host memory is a separate place.

    Attributes:
        arena: its memory, if that is counted.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        super().__init__(HOST)
        self.own = Memory(HOST, is_host=False)
        self.arena = arena

    def available(self) -> int:
        return super().available() if self.arena is None else self.arena.limit - self.arena.num_bytes

    def allocated(self) -> tuple[int, int]:
        return super().allocated() if self.arena is None else (self.arena.num_bytes, self.arena.peak)


class Arena(TorchDispatchMode):
    """Counts bytes of the device while it is active.

    Attributes:
        peak: the largest number of bytes so far.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.peak = 0
        self._known: dict[int, StorageWeakRef] = {}
        self._of_host: dict[int, StorageWeakRef] = {}

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Also count these tensors, which existed before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._known[storage._cdata] = StorageWeakRef(storage)

    @property
    def num_bytes(self) -> int:
        """Current bytes of the device."""
        total = 0
        for key, reference in list(self._known.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._known[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if args and result is args[0]:  # nothing new, but a unit's buffer, the copy's target, was just allocated
            if "copy_" in func.__name__ and args[0].untyped_storage()._cdata in self._known:
                self._check(func)
            return result
        made = [result] if isinstance(result, Tensor) else tree_leaves(result)
        fresh = [tensor for tensor in made if isinstance(tensor, Tensor) and not self._is_known(tensor)]
        if not fresh:
            if "copy_" in func.__name__:
                self._check(func)
            return result
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if fresh[0].untyped_storage()._cdata in before or _is_on_host():  # the former: existed before the arena
            storages = [tensor.untyped_storage() for tensor in fresh]
            self._of_host.update((storage._cdata, StorageWeakRef(storage)) for storage in storages)
            return result
        self.hold(fresh)
        self._check(func)
        return result

    def _check(self, func: Any) -> None:
        num_bytes = self.num_bytes
        self.peak = max(self.peak, num_bytes)
        if num_bytes > self.limit:
            raise OutOfArena(f"{func}: {num_bytes} bytes of {self.limit} that the device has")

    def _is_known(self, tensor: Tensor) -> bool:
        key = tensor.untyped_storage()._cdata
        return any(key in kept and not kept[key].expired() for kept in (self._known, self._of_host))


def _is_on_host() -> bool:
    """Whether the current operation was called by code that works on host memory."""
    for frame in _frames():
        if frame.f_code.co_name == "empty_in":
            return bool(frame.f_locals["memory"].is_host)
        if any(part in frame.f_code.co_filename for part in _ON_HOST):
            return True
    return False


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextmanager
def arena(limit: int, before: Iterable[Tensor] = ()) -> Iterator[Arena]:
    """`before`: tensors that the device already holds."""
    counted = Arena(limit)
    counted.hold(before)
    with counted:
        yield counted
