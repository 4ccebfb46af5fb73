"""Tells blocked ranks that others wait for them, if ranks do not share memory.

While ranks follow a plan (`hf_zero.comm.lockstep`), each issues its gathers without messages to the others. A rank that
waits for a reduction issues no gathers, but another rank may need them before it can start that reduction. So a rank
that waits for long writes to the process group's store how many gathers the others must issue, and a rank that waits
for a reduction polls the store. Without such waits nothing is written or read.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue

import torch.distributed as dist

from hf_zero.comm.rows import Pending

FIRST_LOOK_S, LAST_LOOK_S = 0.01, 0.25  # polling interval: at first, and after many polls


class Demand(ABC):
    """Positive numbers that ranks publish by topic (also a number); each topic keeps the latest."""

    @abstractmethod
    def say(self, topic: int, value: int) -> None:
        """Publish a number. Repeated while this rank waits, because another rank may overwrite it."""

    @abstractmethod
    def look(self, topic: int) -> int:
        """The latest number; 0 if there is none."""

    @abstractmethod
    def forget(self, topic: int) -> None:
        """Drop a topic that is no longer read."""

    @abstractmethod
    def wait(self, pending: Pending, act: Callable[[], None]) -> None:
        """Wait until `pending` has arrived, calling `act` periodically."""


class StoreDemand(Demand):
    """Demand through the process group's store; waits run in separate threads."""

    def __init__(self, store: dist.Store, name: str) -> None:
        """`name`: of the group of ranks; the same on all its ranks and unique."""
        self._store = store
        self._name = name
        self._said: set[int] = set()
        self._idle: list[_Waiter] = []

    def say(self, topic: int, value: int) -> None:
        self._said.add(topic)
        self._store.set(self._key(topic), str(value))

    def look(self, topic: int) -> int:
        key = self._key(topic)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def forget(self, topic: int) -> None:
        if topic in self._said:
            self._said.remove(topic)
            self._store.delete_key(self._key(topic))

    def wait(self, pending: Pending, act: Callable[[], None]) -> None:
        waiter = self._idle.pop() if self._idle else _Waiter()
        waiter.begin(pending.arrive)
        pause = FIRST_LOOK_S
        while not waiter.is_done.wait(pause):
            act()
            pause = min(1.5 * pause, LAST_LOOK_S)
        self._idle.append(waiter)
        if waiter.error is not None:
            raise waiter.error

    def _key(self, topic: int) -> str:
        return f"{self._name}/{topic}"


class _Waiter:
    """A thread that blocks instead of the caller.

    Attributes:
        is_done: set when the call has returned or raised.
        error: the exception raised by the call.
    """

    def __init__(self) -> None:
        self.is_done = threading.Event()
        self.error: Exception | None = None
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name="hf_zero-wait", daemon=True).start()

    def begin(self, arrive: Callable[[], None]) -> None:
        self.is_done.clear()
        self.error = None
        self._todo.put(arrive)

    def _run(self) -> None:
        while True:
            arrive = self._todo.get()
            try:
                arrive()
            except Exception as error:  # noqa: BLE001 (re-raised in the caller)
                self.error = error
            del arrive
            self.is_done.set()
