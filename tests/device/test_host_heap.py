"""Freed host memory is occasionally returned to the system."""

from __future__ import annotations

import pytest

from hf_zero.device import host_memory
from hf_zero.device.host_memory import HostHeap


def test_the_heap_is_trimmed_once_enough_has_been_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(host_memory, "trim", lambda: trims.append(1))
    heap = HostHeap()
    for _ in range(3):
        heap.freed(3 << 20)
    assert len(trims) == 1
    heap.freed(7 << 20)
    assert len(trims) == 1
    heap.freed(1 << 20)
    assert len(trims) == 2


def test_trimming_does_no_harm() -> None:
    host_memory.trim()
