"""An engine's interface to its device: copies to and from host memory, and waits for them.

    host       queues work, and continues
    compute    ----- forward ----- backward --------------- forward -----     the current stream of the device
    gather    [unit 1] [unit 2]    [unit 2]  [unit 1]                         all-gathers of weights
    in                 [unit 1]  [unit 2]        [weights]                    host memory -> device
    out                              [gradients]      [weights]               device -> host memory
    update                                            [kernels]               updates beside the next forward

Each row is a *lane*: its work runs in order, concurrently with other lanes. (Reductions need no lane here: a process
group has its own stream, which waits until compute has filled a buffer.) A copy returns an event at once; a stream
(`wait`) or the host (`host_wait`) waits for the event before it uses the result. These rules prevent reading too early
and overwriting too soon:

- a copy in starts after `after`, when its buffer has been read for the last time; without `after`, after everything
  queued on the compute stream; and after `written`, when its source has arrived in host memory
- a copy out starts after everything queued on the lane that is current then, which has just computed its source
- a gather starts when its row has been written and its buffer has been read for the last time; the compute stream waits
  for the gather before it reads the buffer
- the source of a copy stays unchanged and allocated (`keep_until`) until the copy's event has passed

`Runtime` is a device that completes everything at once, such as the CPU. `Accelerator` (`registry.py`) overrides its
methods, and so does a device for tests that does everything as late as possible (`tests/support/late.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from hf_zero.device.host_memory import host_available
from hf_zero.spans import SPANS

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
    UPDATE = "update"


class Event:
    """A point in the work of a lane, which passes when the work before it is done."""

    __slots__ = ()


DONE = Event()


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


HOST_CLOCK = Clock()
_NO_OTHER_LANE = nullcontext()


class Runtime:
    """One device, as an engine sees it. This class is a device that completes everything before a call returns (the
    CPU, and the meta device in simulations): every event has passed, and no wait blocks.

    Attributes:
        device: the device.
        own: its memory; host memory for a CPU.
        runs_ahead: whether calls only queue work, so that reading a number makes the host wait.
        num_host_waits: how often the host has waited for unfinished work.
        forgotten_peak: the largest peak of `allocated` that `forget_peaks` has reset.
    """

    def __init__(self, device: torch.device = HOST) -> None:
        is_host = device.type == HOST.type
        self.device = device
        self.own = HOST_MEMORY if is_host else Memory(device, is_host=False)
        self.runs_ahead = not is_host  # values on the meta device can never be read
        self.num_host_waits = 0
        self.forgotten_peak = 0

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory differs from host memory."""
        return self.own != HOST_MEMORY

    # Copies

    def copy_in(
        self, home: Tensor, buffer: Tensor, *, after: Event | None = None, written: Event | None = None
    ) -> Event:
        """Start copying `home` in host memory to `buffer` (same shape) in device memory.

        Args:
            after: when the buffer may be written; None: after everything queued on the compute stream so far.
            written: when a copy out has written `home`; None: it has its values.
        """
        return self._copy_now("in", home, buffer)

    def copy_out(self, buffer: Tensor, home: Tensor) -> Event:
        """Start copying `buffer` to `home` in host memory, after everything queued on the current lane so far."""
        return self._copy_now("out", buffer, home)

    def _copy_now(self, lane: str, source: Tensor, target: Tensor) -> Event:
        watcher = SPANS.watcher
        begin = None if watcher is None else HOST_CLOCK.mark()
        target.copy_(source)
        if watcher is not None:
            watcher.transfer(lane, source.numel() * source.element_size(), begin, HOST_CLOCK.mark())
        return DONE

    def copy_beside(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Event) -> None:
        """Copy (source, target) pairs of 1-D tensors to host memory, and wait for the copies.

        Called by a background thread; the training thread does not write to the sources until this returns.

        Args:
            after: event after which the sources have their values.
        """
        # A single call, because the thread would need the GIL between several.
        torch._foreach_copy_([target for _, target in pairs], [source for source, _ in pairs])

    # Other lanes than compute

    def gather_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        """Context that runs kernels and collectives on the gather lane; `record` and `wait` refer to this lane.

        Args:
            after: event to wait for first; None: everything queued on the lane that is current now.
        """
        return _NO_OTHER_LANE

    def update_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        """Context that runs kernels of an update on their own lane, beside the next forward; as `gather_lane`."""
        return _NO_OTHER_LANE

    def wait_for_updates(self) -> None:
        """Make the lane that is current now wait for everything queued on the update lane so far."""
        with self.update_lane(DONE):
            ended = self.record()
        self.wait(ended)

    # Events

    def here(self) -> AbstractContextManager[None]:
        """Context, to be entered once, that returns to the stream that is current now."""
        return _NO_OTHER_LANE

    def record(self, *read: Tensor) -> Event:
        """Return the event that passes when everything queued on the compute stream so far is done.

        Args:
            read: buffers that will be overwritten after the event. Only the late device uses them.
        """
        return DONE

    def wait(self, event: Event) -> None:
        """Make the compute stream wait for `event`. The host does not wait."""

    def host_wait(self, event: Event) -> None:
        """Make the host wait until `event` has passed."""

    def has_passed(self, event: Event) -> bool:
        """Whether `host_wait` would return at once."""
        return True

    def keep_until(self, event: Event, tensor: Tensor) -> None:
        """Keep the memory of `tensor` from being reused before `event`."""

    def synchronize(self) -> None:
        """Wait until everything queued on any lane is done."""

    def copy_to_host(self, values: Tensor) -> tuple[Tensor, Event]:
        """Start copying a few numbers to host memory. Returns the target and the event."""
        return values, DONE

    # Figures

    def available(self) -> int:
        """Free bytes of device memory, including PyTorch's cache."""
        return host_available()

    def allocated(self) -> tuple[int, int]:
        """Bytes of device memory used by tensors: now, and at the peak."""
        return 0, 0

    # The rest

    def range(self, name: str) -> AbstractContextManager[object]:
        """Context that appears under `name` in a profile."""
        return torch.profiler.record_function(name)

    def random_state(self) -> Tensor:
        """State of the device's default generator."""
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        """Restore a state of `random_state`."""
        torch.set_rng_state(state)
