"""How ranks that stand still learn that others wait for them, where no shared memory says so.

While ranks follow a plan (`hf_zero.comm.lockstep`), each issues its gathers without messages to the others. A rank that
waits for a reduction issues none meanwhile; another one may need them before it can start that reduction. A rank that
waits for long writes to the process group's store how far the others must have come, and a rank that waits for a
reduction looks there now and then. Without such waits nothing is written or read.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue

import torch.distributed as dist

from hf_zero.comm.rows import Pending

FIRST_LOOK_S, LAST_LOOK_S = 0.01, 0.25  # between two looks at the store: the first time, and after many


class Demand(ABC):
    """Positive numbers that ranks publish by topic (a number, too); each topic keeps the latest."""

    @abstractmethod
    def say(self, topic: int, value: int) -> None:
        """Publish a number; repeated while this rank waits, so that no rank hides another's for long."""

    @abstractmethod
    def look(self, topic: int) -> int:
        """The latest number; 0: none."""

    @abstractmethod
    def forget(self, topic: int) -> None:
        """Drop a topic that is not read any more."""

    @abstractmethod
    def wait(self, pending: Pending, act: Callable[[], None]) -> None:
        """Return when what `pending` waits for has arrived; until then, call `act` now and then."""


class StoreDemand(Demand):
    """In the store of the process group; waits happen in threads of their own."""

    def __init__(self, store: dist.Store, name: str) -> None:
        """`name`: of the group of ranks, the same on all of them and no other group's."""
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
    """A thread that blocks in the place of the caller.

    Attributes:
        is_done: set when what was begun has returned or raised.
        error: what it has raised.
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
            except Exception as error:  # noqa: BLE001 (whatever it is, the caller gets it)
                self.error = error
            del arrive
            self.is_done.set()
