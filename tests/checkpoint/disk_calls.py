"""The points at which a save can be interrupted: every call that changes something on disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

CHANGES = ("mkdir", "open", "pwrite", "fsync", "replace", "rename", "rmdir", "unlink", "chmod")


class DiskCalls:
    """Counts this process's calls, and runs `act` before call number `stop` (from 1; 0: never).

    An interrupted write has written half of its bytes.
    """

    def __init__(self, stop: int, act: Callable[[], object]) -> None:
        self.count = 0
        self._stop = stop
        self._act = act
        self._lock = threading.Lock()
        self._originals = {name: getattr(os, name) for name in CHANGES}

    def __enter__(self) -> DiskCalls:
        for name, original in self._originals.items():
            setattr(os, name, self._counted(name, original))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(os, name, original)

    def _counted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self.count += 1
                is_the_one = self.count == self._stop
            if is_the_one:
                if name == "pwrite":
                    file, block, offset = args
                    original(file, bytes(block)[: len(block) // 2], offset)
                self._act()
            return original(*args, **kwargs)

        return wrapper
