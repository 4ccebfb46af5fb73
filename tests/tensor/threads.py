"""Tensor-parallel ranks as threads of one process: for hundreds of models, for which processes would take minutes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from hf_zero.comm import Pending
from hf_zero.comm.collectives import LoneCollectives

T = TypeVar("T")
PATIENCE_S = 60.0


class ThreadCollectives(LoneCollectives):
    """Every call stores its tensor in a slot, waits for the others', and reads what it needs."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank)
        self.rank, self.size, self.ranks = rank, len(slots), tuple(range(len(slots)))
        self._slots, self._barrier = slots, barrier

    def _everybodys(self, value: Any) -> list[Any]:
        self._barrier.wait(PATIENCE_S)  # all have read the previous values
        self._slots[self.rank] = value
        self._barrier.wait(PATIENCE_S)
        return list(self._slots)

    def gather_objects(self, value: object) -> list[object]:
        return self._everybodys(value)

    def _all_reduce(self, flat: Tensor) -> Pending:
        flat.copy_(sum(self._everybodys(flat.detach().clone())))  # type: ignore[arg-type]
        return Pending()

    def _all_gather(self, flat: Tensor) -> Pending:
        rows = flat.detach().view(self.size, -1)
        for rank, theirs in enumerate(self._everybodys(rows[self.rank].clone())):
            rows[rank].copy_(theirs)
        return Pending()

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._everybodys(tensor.detach().clone())[source])

    def _sum_small(self, values: Tensor) -> None:
        self._all_reduce(values)


def in_threads(body: Callable[[ThreadCollectives], T], size: int) -> Sequence[T]:
    """Results of `body` on each of `size` ranks. Raises the first failure that another rank did not cause."""
    barrier, slots = threading.Barrier(size), [None] * size

    def run(rank: int) -> T:
        try:
            return body(ThreadCollectives(rank, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [future.exception() for future in futures]
    for error in sorted(filter(None, errors), key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
