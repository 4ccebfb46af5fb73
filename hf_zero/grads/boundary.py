"""Where a backward stands in an accumulation of gradients, and who decides it.

who decides                     a backward knows            an update follows
DeepSpeed's count               whether it is the last      the N-th `step()`
Accelerate (or the program)     what it was told            a `step()` after a backward that was told to be last
a plain loop                    nothing                     every `step()`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum, auto


class Boundary(Enum):
    """What follows a backward. Gradients that ranks shard are reduced in any case."""

    ACCUMULATE = auto()  # others come first, or nobody knows: gradients that every rank keeps whole stay local
    LAST = auto()  # an update, for certain
    DROPPABLE = auto()  # an update, unless the program drops the gradients: they came with another engine's loss


class Boundaries(ABC):
    """Decides for an engine where its backwards stand, and which calls of `step` update."""

    counts_backwards = True
    """Whether every backward is a micro-batch, or every call of `step`."""

    @property
    @abstractmethod
    def is_last(self) -> bool:
        """Whether the present or next backward is certain to be the last before an update."""

    @property
    @abstractmethod
    def is_update(self) -> bool:
        """Whether `step` updates, if it is called now."""

    def stepped(self) -> None:  # noqa: B027 (most do not count)
        """`step` was called."""


class CountedBoundaries(Boundaries):
    """Every N-th `step` updates, and one backward precedes each (gradient_accumulation_steps).

    Attributes:
        num_steps: calls of `step` since the last update. N may change in between.
    """

    counts_backwards = False

    def __init__(self, wanted: Callable[[], int]) -> None:
        """`wanted`: returns the present N."""
        self._wanted = wanted
        self.num_steps = 0

    @property
    def is_last(self) -> bool:
        return self.num_steps + 1 >= self._wanted()

    @property
    def is_update(self) -> bool:
        return self.is_last

    def stepped(self) -> None:
        self.num_steps = 0 if self.is_last else self.num_steps + 1


class GivenBoundaries(Boundaries):
    """The program tells before each backward (`set_gradient_accumulation_boundary`)."""

    def __init__(self, *, is_last: bool) -> None:
        self._is_last = is_last

    @property
    def is_last(self) -> bool:
        return self._is_last

    @property
    def is_update(self) -> bool:
        return self._is_last


class BoundaryAtStep(Boundaries):
    """Every `step` updates, however many backwards precede it (managed_gradient_accumulation: false)."""

    @property
    def is_last(self) -> bool:
        return False

    @property
    def is_update(self) -> bool:
        return True
