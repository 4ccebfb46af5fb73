"""An engine's interface to its device: copies to and from host memory, and waits for them.

    host       queues work, and continues
    compute    ----- forward ----- backward --------------- forward -----     the current stream of the device
    gather    [unit 1] [unit 2]    [unit 2]  [unit 1]                         all-gathers of weights
    in                 [unit 1]  [unit 2]        [weights]                    host memory -> device
    out                              [gradients]                              device -> host memory

Each row is a *lane*: its work runs in order, concurrently with other lanes. (Reductions need no lane here: a process
group has its own stream, which waits until compute has filled a buffer.) A copy returns an event at once; a stream
(`wait`) or the host (`host_wait`) waits for the event before it uses the result. These rules prevent reading too early
and overwriting too soon:

- a copy in starts after `after`, when its buffer has been read for the last time; without `after`, after everything
  queued on the compute stream
- a copy out starts after everything queued on the compute stream, because its source has just been computed
- a gather starts when its row has been written and its buffer has been read for the last time; the compute stream waits
  for the gather before it reads the buffer
- the source of a copy stays unchanged and allocated (`keep_until`) until the copy's event has passed

There are three implementations: the accelerator's and the CPU's, which completes everything at once (both in
`registry.py`), and one for tests that does everything as late as possible (`tests/support/late.py`).
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
        device: the `device` of tensors there.
        is_host: whether it is host memory; the late device's own memory is also on the CPU, but is not host memory.
    """

    device: torch.device
    is_host: bool = True


HOST_MEMORY = Memory(HOST)


class Lane(Enum):
    """A stream of work that runs concurrently with the others."""

    COMPUTE = "compute"
    GATHER = "gather"
    IN = "in"
    OUT = "out"


class Event:
    """A point in the work of a lane, which passes when the work before it is done."""

    __slots__ = ()


DONE = Event()


class Runtime(ABC):
    """One device, as an engine sees it.

    Attributes:
        device: the device.
        own: its memory; host memory for a CPU.
        runs_ahead: whether calls only queue work, so that reading a number makes the host wait.
        num_host_waits: how often the host has waited for unfinished work.
    """

    runs_ahead = False

    def __init__(self, device: torch.device, own: Memory) -> None:
        self.device = device
        self.own = own
        self.num_host_waits = 0

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory differs from host memory."""
        return self.own != HOST_MEMORY

    # Copies

    @abstractmethod
    def copy_in(self, home: Tensor, buffer: Tensor, *, after: Event | None = None) -> Event:
        """Start copying `home` in host memory to `buffer` (same shape) in device memory.

        Args:
            after: when the buffer may be written; None: after everything queued on the compute stream so far.
        """

    @abstractmethod
    def copy_out(self, buffer: Tensor, home: Tensor) -> Event:
        """Start copying `buffer` to `home` in host memory, after everything queued on the compute stream so far."""

    def copy_beside(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Event) -> None:
        """Copy (source, target) pairs of 1-D tensors to host memory, and wait for the copies.

        Called by a background thread; the training thread does not write to the sources until this returns.

        Args:
            after: event after which the sources have their values.
        """
        # A single call, because the thread would need the GIL between several.
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])

    # Gathers

    @abstractmethod
    def gather_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        """Context that runs kernels and collectives on the gather lane; `record` and `wait` refer to this lane.

        Args:
            after: event to wait for first; None: everything queued on the lane that is current now.
        """

    # Events

    @abstractmethod
    def record(self, *read: Tensor) -> Event:
        """Return the event that passes when everything queued on the compute stream so far is done.

        Args:
            read: buffers that will be overwritten after the event. Only the late device uses them.
        """

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make the compute stream wait for `event`. The host does not wait."""

    @abstractmethod
    def host_wait(self, event: Event) -> None:
        """Make the host wait until `event` has passed."""

    @abstractmethod
    def has_passed(self, event: Event) -> bool:
        """Whether `host_wait` would return at once."""

    @abstractmethod
    def keep_until(self, event: Event, tensor: Tensor) -> None:
        """Keep the memory of `tensor` from being reused before `event`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything queued on any lane is done."""

    def copy_to_host(self, values: Tensor) -> tuple[Tensor, Event]:
        """Start copying a few numbers to host memory. Returns the target and the event."""
        return values, DONE

    # Figures

    @abstractmethod
    def available(self) -> int:
        """Free bytes of device memory, including PyTorch's cache."""

    def allocated(self) -> tuple[int, int]:
        """Bytes of device memory used by tensors: now, and at the peak."""
        return 0, 0

    # The rest

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Context that appears under `name` in a profile."""
        with torch.profiler.record_function(name):
            yield

    @abstractmethod
    def random_state(self) -> Tensor:
        """State of the device's default generator."""

    @abstractmethod
    def set_random_state(self, state: Tensor) -> None:
        """Restore a state of `random_state`."""


class HostMark(Event):
    """A time of the host's clock, in nanoseconds."""

    __slots__ = ("at_ns",)

    def __init__(self, at_ns: int) -> None:
        self.at_ns = at_ns


class Clock:
    """The host's clock, for a device that completes everything before a call returns."""

    def mark(self) -> Event:
        """Mark the time at which everything queued on the compute stream so far is done."""
        return HostMark(time.perf_counter_ns())

    def mark_after(self, wait: Callable[[], None]) -> Event | None:
        """Mark the time at which work outside the compute stream is done. `wait` makes the current stream wait for it.

        Returns None if only the host could tell, by waiting.
        """
        return None

    def elapsed_ns(self, begin: Event, end: Event) -> int:
        """Nanoseconds between two marks that have passed."""
        assert isinstance(begin, HostMark) and isinstance(end, HostMark), "marks of another clock"
        return end.at_ns - begin.at_ns

    def has_passed(self, mark: Event) -> bool:
        return True

    def synchronize(self) -> None:
        """Wait until every mark has passed."""
