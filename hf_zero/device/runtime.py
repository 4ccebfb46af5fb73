"""An engine's interface to its device: copies to and from host memory, and waits for them.

    host       queues work, and continues
    compute    ----- forward ----- backward --------------- forward -----     the current stream of the device
    gather    [unit 1] [unit 2]    [unit 2]  [unit 1]                         all-gathers of weights
    in                 [unit 1]  [unit 2]        [weights]                    host memory -> device
    out                              [gradients]                              device -> host memory

Each row is a *lane*: what is asked of it is done in order, beside the others. (Reductions need no lane of ours: a
process group has a stream of its own, on which it takes up a buffer when compute has filled it.) A copy returns an
event at once; a stream (`wait`) or the host (`host_wait`) waits for that before it uses the result. The rules by which
nothing is read too early or overwritten too late:

- a copy in begins after `after`, which is when its buffer has been read for the last time; without it, after
  everything that has been asked of the compute stream
- a copy out begins after everything that has been asked of the compute stream: its source has just been computed
- a gather begins when its row has been written and its buffer has been read for the last time; the compute stream waits
  for the gather before it reads the buffer
- the source of a copy stays as it is, and stays allocated (`keep_until`), until the copy's event has passed

Three implementations: the accelerator's own and the CPU's, where everything is done at once (both in `registry.py`),
and one for tests that does everything as late as it may (`tests/support/late.py`).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Memory:
    """A place for tensors.

    Attributes:
        device: what tensors there say of themselves.
        is_host: whether it is the host's; the late device's own memory lies on the CPU, too, and is another one.
    """

    device: torch.device
    is_host: bool = True


HOST_MEMORY = Memory(HOST)


class Lane(Enum):
    """A stream of work beside the others."""

    COMPUTE = "compute"
    GATHER = "gather"
    IN = "in"
    OUT = "out"


class Event:
    """Something that has been asked of a lane, and will have been done at some time."""

    __slots__ = ()


DONE = Event()


class Runtime(ABC):
    """One device, as an engine sees it.

    Attributes:
        device: where it computes.
        own: the memory it computes in; the host's for a CPU.
        runs_ahead: whether work is only queued when a call returns, so that reading a number makes the host wait.
        num_host_waits: how often the host has stood still for something that had not been done yet.
    """

    runs_ahead = False

    def __init__(self, device: torch.device, own: Memory) -> None:
        self.device = device
        self.own = own
        self.num_host_waits = 0

    @property
    def has_own_memory(self) -> bool:
        """Whether host memory is another place."""
        return self.own != HOST_MEMORY

    # Copies

    @abstractmethod
    def copy_in(self, home: Tensor, buffer: Tensor, *, after: Event | None = None) -> Event:
        """Begin to copy `home` in host memory to `buffer` (same shape) in the device's.

        Args:
            after: when the buffer may be written to; None: after everything asked of the compute stream so far.
        """

    @abstractmethod
    def copy_out(self, buffer: Tensor, home: Tensor) -> Event:
        """Begin to copy `buffer`, as everything asked of the compute stream so far leaves it, to `home` in host
        memory."""

    def copy_beside(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Event) -> None:
        """Copy each first tensor, 1-D, to the second, in host memory; returns when that is done.

        For a thread beside the one that trains, which leaves the first ones as they are until then.

        Args:
            after: recorded when the first ones had been asked for.
        """
        # One call: between several, the thread would need the interpreter's lock.
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])

    # Gathers

    @abstractmethod
    def gather_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        """Run what is inside on the lane of gathers: kernels and collectives, and `record` and `wait`
        speak of this lane.

        Args:
            after: what it has to wait for first; None: everything asked of the lane that is left for it.
        """

    # Events

    @abstractmethod
    def record(self, *read: Tensor) -> Event:
        """The event after which everything asked of the compute stream so far is done.

        Args:
            read: buffers that will be copied into after the event. Only the late device looks at them.
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let the compute stream wait for `event`. The host does not wait."""

    @abstractmethod
    def host_wait(self, event: Event) -> None:
        """Return when `event` has passed."""

    @abstractmethod
    def has_passed(self, event: Event) -> bool:
        """Whether `host_wait` would return at once."""

    @abstractmethod
    def keep_until(self, event: Event, tensor: Tensor) -> None:
        """Keep the memory of `tensor` from being given to others before `event`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when everything asked of any lane is done."""

    def copy_to_host(self, values: Tensor) -> tuple[Tensor, Event]:
        """A few numbers on their way to host memory: where they will be, and when."""
        return values, DONE

    # Figures

    @abstractmethod
    def available(self) -> int:
        """Free bytes of the device's memory, PyTorch's cache included."""

    def allocated(self) -> tuple[int, int]:
        """Bytes of the device's memory that tensors take: now, and at most so far."""
        return 0, 0

    # The rest

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Show what runs inside under `name` in a profile."""
        with torch.profiler.record_function(name):
            yield

    @abstractmethod
    def random_state(self) -> Tensor:
        """State of the device's default generator."""

    @abstractmethod
    def set_random_state(self, state: Tensor) -> None:
        """Take back what `random_state` gave."""


class HostMark(Event):
    """A moment of the host's clock, in nanoseconds."""

    __slots__ = ("at_ns",)

    def __init__(self, at_ns: int) -> None:
        self.at_ns = at_ns


class Clock:
    """The host's clock, for a device that has done everything when a call returns."""

    def mark(self) -> Event:
        """The moment at which everything asked of the compute stream so far is done."""
        return HostMark(time.perf_counter_ns())

    def mark_after(self, wait: Callable[[], None]) -> Event | None:
        """The moment at which something beside the compute stream is done. `wait` lets the current stream wait for it.

        None where only the host could tell, by waiting.
        """
        return None

    def elapsed_ns(self, begin: Event, end: Event) -> int:
        """From one mark to another; both have passed."""
        assert isinstance(begin, HostMark) and isinstance(end, HostMark), "marks of another clock"
        return end.at_ns - begin.at_ns

    def has_passed(self, mark: Event) -> bool:
        return True

    def synchronize(self) -> None:
        """Return when every mark has passed."""
