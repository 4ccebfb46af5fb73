"""What is asked of the device around a checkpointed call, in forward and when it runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.device.clocks import Clock
from hf_zero.device.runtime import Event, Runtime
from hf_zero.log import announce


class Times:
    """Of the calls of one forward and its backward; said when the next forward begins."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._forward: list[tuple[Event, Event]] = []
        self._again: list[tuple[Event, Event]] = []

    def add(self, begin: Event, end: Event, *, again: bool) -> None:
        if not again and self._again:
            self.tell()
        (self._again if again else self._forward).append((begin, end))

    def tell(self) -> None:
        """Waits for the device."""
        if self._forward:
            self.clock.synchronize()
            announce(
                f"activation_checkpointing: {len(self._forward)} checkpointed calls, forward {self._ms(self._forward)} "
                f"ms; {len(self._again)} run again in backward, {self._ms(self._again)} ms"
            )
        self._forward, self._again = [], []

    def _ms(self, intervals: list[tuple[Event, Event]]) -> str:
        return f"{sum(self.clock.elapsed_ns(begin, end) for begin, end in intervals) / 1e6:.1f}"


def watched(function: Callable[..., Any], runtime: Runtime | None, times: Times | None) -> Callable[..., Any]:
    """`function`, whose first call is the forward and later ones its recomputation.

    Args:
        runtime: of a device to wait for before and after each call.
        times: told how long each takes.
    """
    has_run = [False]

    def call(*args: Any, **kwargs: Any) -> Any:
        again, has_run[0] = has_run[0], True
        if runtime is not None:
            runtime.synchronize()
        begin = times.clock.mark() if times is not None else None
        try:
            return function(*args, **kwargs)
        finally:  # torch ends a recomputation by an exception as soon as it has what it needs
            if times is not None and begin is not None:
                times.add(begin, times.clock.mark(), again=again)
            if runtime is not None:
                runtime.synchronize()

    return call
