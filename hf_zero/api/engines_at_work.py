"""The engines of this process that a backward may reach, the same on all ranks.

An engine is at work from a forward that records gradients until its next step or zero_grad. Ranks exchange what each of
them has got, so they must name the same engines; but Python frees an engine that nobody uses any more when the garbage
collector comes by, which is another moment on every rank. With several ranks those at work are therefore held here.
What has been abandoned meanwhile goes when the next engine is made, at the same place of the program on every rank.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar


class Numbered(Protocol):
    """`number` is the same on all ranks, and later engines have larger ones."""

    number: int


_Engine = TypeVar("_Engine", bound=Numbered)


class EnginesAtWork(Generic[_Engine]):
    """Of one process."""

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[int, _Engine] = weakref.WeakValueDictionary()
        self._held: dict[int, _Engine] = {}

    def begin(self, engine: _Engine, *, has_peers: bool) -> None:
        """A loss may depend on `engine` now. `has_peers`: other ranks will be told about it."""
        self._alive[engine.number] = engine
        if has_peers:
            self._held[engine.number] = engine

    def end(self, engine: _Engine) -> None:
        """Its gradients have been applied or dropped."""
        self._alive.pop(engine.number, None)
        self._held.pop(engine.number, None)

    def others(self, engine: _Engine) -> Sequence[_Engine]:
        """All but `engine`, in the order in which they were made."""
        return [other for number, other in sorted(self._alive.items()) if number != engine.number]

    def drop_abandoned(self) -> None:
        """Free those that nothing but this object holds."""
        if self._held:
            self._held.clear()
            gc.collect()
            self._held.update(self._alive)
