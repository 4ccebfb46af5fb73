"""File access that a test can make fail."""

from __future__ import annotations

from hf_zero.offload.swap_store import FileAccess


class RefusingAccess(FileAccess):
    """Calls `check`, which may raise, before every operation."""

    def check(self, verb: str) -> None:
        """`verb`: read, write or reserve."""

    def read_at(self, file: int, into: memoryview, offset: int) -> int:
        self.check("read")
        return super().read_at(file, into, offset)

    def write_at(self, file: int, source: memoryview, offset: int) -> int:
        self.check("write")
        return super().write_at(file, source, offset)

    def reserve(self, file: int, offset: int, num_bytes: int) -> None:
        self.check("reserve")
        super().reserve(file, offset, num_bytes)
