"""A simulated device that does everything as late as it may, so that a missing wait fails a test without a GPU.

Device memory is in CPU memory, separate from host memory, and compute is immediate. Only copies and gathers are late:

- the target of a copy is poisoned (NaN) from the request until somebody on the target's side has waited for the copy:
  the compute stream for device memory, the host for host memory. Some copies are carried out earlier, in random order
- the source must not change before somebody on the source's side knows that the copy has read it
- memory that is freed while a copy needs it is poisoned; writing into it is an error
- two copies that touch the same memory, or a copy into a buffer that the compute stream still reads, must be ordered;
  memory that was given back meanwhile no longer counts
- a gather copies a row of this rank into the buffer of all ranks' rows; the gather lane must be ordered after all
  writes of the compute stream into the row since it was last gathered
- `torch.split_with_sizes_copy` reads any dense tensor as if it were contiguous, as on CUDA
Knowledge is tracked by vector clocks: for every lane, up to which of its entries. Waiting for an event takes over its
knowledge. The calls that order things are *wait sites*, identified by the calling line; a subclass may skip one to
check that some test fails then (`skips`).

With HF_ZERO_LATE_DEVICE=1 in the environment engines on the CPU use it, in the test process and in ranks (`make
test-late`).
"""

from __future__ import annotations

import linecache
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch._prims_common import make_contiguous_strides_for

import hf_zero
from hf_zero.device import registry
from hf_zero.device.cores import Cores
from hf_zero.device.runtime import HOST, Event, Lane, Memory, Runtime

_PASSES_AFTER = 2  # ranges: work from before the last forward and backward has long been done


VARIABLE = "HF_ZERO_LATE_DEVICE"


def use_if_asked_for() -> None:
    """Makes it this process' CPU runtime, if the environment requests it."""
    if os.environ.get(VARIABLE) == "1":
        registry._runtimes[HOST] = Late()
        mock.patch.object(Cores, "here", lambda: Cores((0,))).start()  # see `use`
        torch.split_with_sizes_copy = split_as_on_cuda


def split_as_on_cuda(run: Tensor, sizes: Sequence[int], dim: int, *, out: Sequence[Tensor]) -> None:
    """`torch.split_with_sizes_copy`, with what CUDA's fast way makes of a dense tensor that is not contiguous."""
    if torch.ops.aten.is_non_overlapping_and_dense(run):
        run = run.as_strided(run.shape, make_contiguous_strides_for(run.shape))
    for target, values in zip(out, run.split_with_sizes(sizes, dim), strict=True):
        target.copy_(values)


class LateError(AssertionError):
    """Something was read too early, or written too late, or freed too soon."""


# The names of lanes: members of an Enum are hashed in Python, and clocks are read a million times.
LANES = COMPUTE, GATHER, IN, OUT, UPDATE = tuple(
    lane.value for lane in (Lane.COMPUTE, Lane.GATHER, Lane.IN, Lane.OUT, Lane.UPDATE)
)
Clock = dict[str, int]


def _new_clock() -> Clock:
    return dict.fromkeys(LANES, 0)


class LateEvent(Event):
    """What has happened before the event, and when it was created."""

    __slots__ = ("clock", "born")

    def __init__(self, clock: Clock, born: int) -> None:
        self.clock = clock
        self.born = born


@dataclass(slots=True)
class _Span:
    """A range of bytes of some memory."""

    start: int
    stop: int

    def overlaps(self, other: _Span) -> bool:
        return self.start < other.stop and other.start < self.stop


@dataclass(slots=True, eq=False)
class _Copy:
    """A requested copy; forgotten when everybody concerned knows that it is done. All tensors are of bytes."""

    lane: str
    number: int
    site: str
    source: Tensor
    target: Tensor
    before: Tensor  # the source at the time of the request
    values: Tensor  # the target's values after the copy
    spans: tuple[_Span, _Span]  # of source and target
    clock: Clock  # of the lane, including this copy
    is_done: bool = False
    may_change: bool = False  # whether a later copy may overwrite the source
    storages: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.storages = _storage(self.source), _storage(self.target)

    def is_known(self, clock: Clock) -> bool:
        return clock[self.lane] >= self.number


@dataclass(slots=True)
class _Lease:
    """A buffer that a lane reads until a given entry."""

    buffer: Tensor
    span: _Span
    lane: str
    number: int
    site: str
    storage: int

    @property
    def is_gone(self) -> bool:
        return not _has_memory(self.buffer)


@dataclass(slots=True)
class _Row:
    """A source of gathers.

    Attributes:
        row: its bytes; keeps the memory alive, so that no other row gets its address.
        seen: its content at the last check.
        written: the entry of the compute stream that wrote this content.
    """

    row: Tensor
    seen: Tensor
    storage: int
    written: int = 0

    def has_changed(self) -> bool:
        return not torch.equal(self.row, self.seen)


class Late(Runtime):
    """See the module's docstring. Compute is immediate, on the CPU."""

    def __init__(self, *, early: float = 0.2, seed: int = 0) -> None:
        """`early`: the probability that a copy is carried out before anybody waits for it."""
        super().__init__(HOST)
        self.own = Memory(HOST, is_host=False)
        self.runs_ahead = True
        self._early = early
        self._random = random.Random(seed)
        self._clocks = {lane: _new_clock() for lane in LANES}
        self._here = COMPUTE  # the lane for which `record` and `wait` are called
        self._rows: dict[tuple[int, int], _Row] = {}  # rows that were gathered, by address and length
        self._host = _new_clock()
        self._copies: list[_Copy] = []
        self._leases: list[_Lease] = []
        self._kept: list[tuple[LateEvent, Tensor]] = []
        self._num_ranges = 0
        self.trace: list[tuple[str, str]] | None = None  # of (lane, what), if requested

    def skips(self, site: str) -> bool:
        """Whether to omit the ordering requested at `site`."""
        return False

    # Copies

    def copy_in(
        self, home: Tensor, buffer: Tensor, *, after: Event | None = None, written: Event | None = None
    ) -> Event:
        site = _site()
        clock = self._clocks[IN]
        if after is None:
            _learn(clock, self._clocks[self._here])
        elif isinstance(after, LateEvent) and not self.skips(f"{site} after"):
            _learn(clock, after.clock)
        if isinstance(written, LateEvent) and not self.skips(f"{site} written"):
            _learn(clock, written.clock)
        return self._copy(IN, home, buffer, site)

    def copy_out(self, buffer: Tensor, home: Tensor) -> Event:
        _learn(self._clocks[OUT], self._clocks[self._here])
        return self._copy(OUT, buffer, home, _site())

    def copy_to_host(self, values: Tensor) -> tuple[Tensor, Event]:
        here = torch.empty_like(values, device=HOST, memory_format=torch.contiguous_format)
        _learn(self._clocks[OUT], self._clocks[self._here])
        source = values.detach().clone()
        event = self._copy(OUT, source, here, _site())
        # torch keeps both: the compute stream is in order, and pinned memory is not reused before its copy is done
        self._kept += [(event, source), (event, here)]
        return here, event

    def copy_beside(self, pairs: Sequence[tuple[Tensor, Tensor]], after: Event) -> None:
        """Runs in the calling thread: nobody else may write to the sources or read the targets until it returns."""
        before = [source.clone() for source, _ in pairs]
        for _, target in pairs:
            _poison(target)
        time.sleep(0.05)
        if not all(torch.equal(_bytes(source), _bytes(copy)) for (source, _), copy in zip(pairs, before)):
            raise LateError("the source of a copy beside training has changed before it was done")
        super().copy_beside(pairs, after)

    def gather_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        return self._on(GATHER, after, _site())

    def update_lane(self, after: Event | None = None) -> AbstractContextManager[None]:
        return self._on(UPDATE, after, _site())

    def _on(self, lane: str, after: Event | None, site: str) -> AbstractContextManager[None]:
        clock = self._clocks[lane]
        if after is None and self._here != lane:
            after = self.record()
        if isinstance(after, LateEvent) and not self.skips(f"{site} after"):
            _learn(clock, after.clock)
        _learn(clock, self._host)
        return self._current(lane)

    @contextmanager
    def _current(self, lane: str) -> Iterator[None]:
        if lane == UPDATE:
            self._look()  # what has changed so far is another lane's work
        before, self._here = self._here, lane
        self._catch_up()
        try:
            yield
        finally:
            if lane == UPDATE:
                self._look()
                for copy in self._copies:
                    copy.before = copy.source.clone()
            self._here = before

    def gather(self, row: Tensor, rows: Tensor, values: Tensor) -> None:
        """On the gather lane: `row` is sent to all ranks, and `values`, received from all, are written to `rows`."""
        assert self._here == GATHER
        site = _site()
        here = row.data_ptr(), row.numel()
        if here not in self._rows:
            content = _alias(row)
            self._rows[here] = _Row(content, content.clone(), _storage(content))
        known = self._rows[here]
        if known.has_changed() or self._clocks[GATHER][COMPUTE] < known.written:
            raise LateError(f"{site}: a gather of a row that the compute stream may not have written yet")
        self._copy(GATHER, row, rows, site, values)

    def _copy(self, lane: str, source: Tensor, target: Tensor, site: str, values: Tensor | None = None) -> LateEvent:
        self._look()
        clock = self._clocks[lane]
        _learn(clock, self._host)
        spans = _span(source), _span(target)
        self._pass_on(clock, *spans)
        moved = source if values is None else values
        assert moved.shape == target.shape and moved.dtype == target.dtype, "copies move bytes"
        before = _alias(source).clone()
        values = before if values is None else _alias(values)
        copy = _Copy(lane, 0, site, _alias(source), _alias(target), before, values, spans, clock)
        self._refuse_race(copy)
        clock[lane] += 1
        copy.number, copy.clock = clock[lane], clock.copy()
        copy.target.fill_(255)
        self._look_at_rows(within=copy.spans[1])
        self._copies.append(copy)
        _note(self.trace, lane, f"{_place(site)} {source.numel()}")
        if self._random.random() < self._early:
            self._carry_out(self._random.choice(self._copies))
        return LateEvent(copy.clock, self._num_ranges)

    def _pass_on(self, clock: Clock, source: _Span, target: _Span) -> None:
        """Everything that a requested copy depends on is done before it."""
        for other in self._copies:
            if not other.is_known(clock):
                continue
            if source.overlaps(other.spans[1]):
                self._carry_out(other)
            if target.overlaps(other.spans[0]):
                self._carry_out(other)
                other.may_change = True

    def _refuse_race(self, copy: _Copy) -> None:
        source, target = copy.spans
        for other in self._copies:
            if other.lane == copy.lane or other.is_known(copy.clock):
                continue
            if any(target.overlaps(span) for span in other.spans) or source.overlaps(other.spans[1]):
                raise LateError(f"{copy.site}: a copy touches what that of {other.site} may still use")
        for lease in self._leases:
            if target.overlaps(lease.span) and not lease.is_gone and copy.clock[lease.lane] < lease.number:
                raise LateError(f"{copy.site}: a copy into what the compute stream may still read ({lease.site})")

    # Events

    def record(self, *read: Tensor) -> Event:
        self._look()
        clock, lane = self._clocks[self._here], self._here
        _learn(clock, self._host)
        clock[lane] += 1
        for buffer in map(_alias, read):
            self._leases.append(_Lease(buffer, _span(buffer), lane, clock[lane], _site(), _storage(buffer)))
        if lane == COMPUTE:
            self._look_at_rows(clock[lane])
        return LateEvent(clock.copy(), self._num_ranges)

    def wait(self, event: Event) -> None:
        site = _site()
        if isinstance(event, LateEvent) and not self.skips(site):
            self._look()
            _learn(self._clocks[self._here], event.clock)
            _note(self.trace, self._here, f"{_place(site)} waits")
            self._catch_up()

    def host_wait(self, event: Event) -> None:
        site = _site()
        if isinstance(event, LateEvent) and not self.skips(site):
            self._look()
            self.num_host_waits += not self.has_passed(event)
            _note(self.trace, "host", f"{_place(site)} waits")
            self._host_learns(event.clock)

    def has_joined(self, lane: Lane) -> bool:
        """Whether the compute stream has waited for everything that `lane` has recorded."""
        return self._clocks[COMPUTE][lane.value] >= self._clocks[lane.value][lane.value]

    def kept_addresses(self) -> set[int]:
        """Addresses of memory that is kept until an event, even if it is freed."""
        return {tensor.untyped_storage().data_ptr() for _, tensor in self._kept}

    def has_passed(self, event: Event) -> bool:
        if not isinstance(event, LateEvent):
            return True
        is_old = self._num_ranges - event.born >= _PASSES_AFTER
        return is_old or _covers(self._host, event.clock)

    def keep_until(self, event: Event, tensor: Tensor) -> None:
        site = _site()
        if isinstance(event, LateEvent) and not self.skips(site):
            self._kept.append((event, tensor))

    def synchronize(self) -> None:
        self._look()
        everything = _new_clock()
        for clock in self._clocks.values():
            _learn(everything, clock)
        self._host_learns(everything)

    def _host_learns(self, clock: Clock) -> None:
        _learn(self._host, clock)
        _learn(self._clocks[self._here], self._host)  # later requests of the host come after
        self._catch_up()

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        self._num_ranges += 1
        _note(self.trace, "compute", name)
        with super().range(name):
            yield

    def _look_at_rows(self, entry: int | None = None, within: _Span | None = None) -> None:
        """Updates rows `within` a span, written by an `entry` of the compute stream or by a copy."""
        for known in self._rows.values():
            if (within is None or within.overlaps(_span(known.row))) and known.has_changed():
                known.seen = known.row.clone()
                known.written = known.written if entry is None else entry

    # Carrying out copies

    def _catch_up(self) -> None:
        """Carry out copies that are known to be done on the target's side; forget those that no longer matter."""
        here = self._clocks[self._here]
        for copy in self._copies:
            arrives_here = copy.lane not in (OUT, self._here)
            if copy.is_known(self._host) or (arrives_here and copy.is_known(here)):
                self._carry_out(copy)
        self._copies = [copy for copy in self._copies if not (copy.is_done and self._is_source_free(copy))]
        self._leases = [x for x in self._leases if self._host[x.lane] < x.number and not x.is_gone]
        self._kept = [(event, tensor) for event, tensor in self._kept if not _covers(self._host, event.clock)]

    def _is_source_free(self, copy: _Copy) -> bool:
        """Whether the side that reuses the memory knows that the copy is done; it knows what the host knows when it
        requests something."""
        lane = UPDATE if self._here == UPDATE else COMPUTE
        return copy.is_known(self._host) or (copy.lane != IN and copy.is_known(self._clocks[lane]))

    def _carry_out(self, copy: _Copy) -> None:
        if copy.is_done:
            return
        copy.is_done = True
        for other in self._copies:
            if other is not copy and other.is_known(copy.clock):
                self._carry_out(other)
        with torch.no_grad():
            copy.target.copy_(copy.values)
        self._look_at_rows(within=copy.spans[1])

    def _look(self) -> None:
        """Checks that memory of pending copies was not changed."""
        aliases = Counter(chain.from_iterable(copy.storages for copy in self._copies))
        aliases.update(known.storage for known in self._rows.values())
        aliases.update(lease.storage for lease in self._leases)
        for copy in self._copies:
            ends = zip((copy.source,) if copy.is_done else (copy.source, copy.target), copy.storages)
            for end, storage in ends:
                is_held = _num_uses(storage) > aliases[storage]
                if not (is_held and _has_memory(end)) and end.numel():
                    raise LateError(f"{copy.site}: memory was given back before its copy {copy.lane} was done")
            is_free = copy.may_change or self._is_source_free(copy)
            if not is_free and not torch.equal(copy.source, copy.before):
                raise LateError(f"{copy.site}: the source of a copy {copy.lane} has changed before it was done")


class Deaf(Late):
    """Skips the wait at one site, and records all sites, as paths within the package with the line."""

    def __init__(self, early: float = 0.0, deaf_at: str = "") -> None:
        super().__init__(early=early)
        self.deaf_at = deaf_at
        self.sites: set[str] = set()

    def skips(self, site: str) -> bool:
        name = site.rpartition("/hf_zero/")[2]
        self.sites.add(name)
        return name == self.deaf_at


def line_of(site: str) -> str:
    """The source line of a site that `Deaf` has recorded."""
    path, number = site.removesuffix(" after").split(":")
    return linecache.getline(str(Path(hf_zero.__file__).parent / path), int(number)).strip()


def _note(trace: list[tuple[str, str]] | None, lane: str, what: str) -> None:
    if trace is not None:
        trace.append((lane, what))


def _learn(clock: Clock, other: Clock) -> None:
    for lane, number in other.items():
        if clock[lane] < number:
            clock[lane] = number


def _covers(clock: Clock, other: Clock) -> bool:
    return all(clock[lane] >= number for lane, number in other.items())


def _alias(tensor: Tensor) -> Tensor:
    """The bytes of contiguous memory as a separate tensor object, so that other references can be counted."""
    return _bytes(tensor.detach())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _poison(tensor: Tensor) -> None:
    with torch.no_grad():
        _bytes(tensor).fill_(255)


def _span(tensor: Tensor) -> _Span:
    assert tensor.is_contiguous(), "copies are of contiguous memory"
    return _Span(tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())


def _has_memory(tensor: Tensor) -> bool:
    """Whether the tensor's storage has not been emptied."""
    return tensor.untyped_storage().nbytes() > 0 or not tensor.numel()


def _storage(tensor: Tensor) -> int:
    """Identifies a tensor's storage as long as the tensor is alive."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _num_uses(storage: int) -> int:
    """Number of tensors that use a storage."""
    count: int = torch._C._storage_Use_Count(storage)
    return count - _OF_PYTHON


_OF_PYTHON = 0  # the uses of a storage by its own Python object
_ONE_TENSOR = torch.empty(1)
_OF_PYTHON = _num_uses(_storage(_ONE_TENSOR)) - 1


def _site() -> str:
    """The calling line outside this package."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "/hf_zero/device/" in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _place(site: str) -> str:
    return site.rpartition("/")[2]


@contextmanager
def use(runtime: Runtime) -> Iterator[Runtime]:
    """Engines created inside run on `runtime` instead of their device's own, and update on one thread.

    With the host's cores the threads of an offloaded update wait for each other busily, which takes more time than all
    else that a small engine does.
    """
    before, split = registry._runtimes.get(runtime.device), torch.split_with_sizes_copy
    registry._runtimes[runtime.device], torch.split_with_sizes_copy = runtime, split_as_on_cuda
    try:
        with mock.patch.object(Cores, "here", lambda: Cores((0,))):
            yield runtime
    finally:
        torch.split_with_sizes_copy = split
        if before is None:
            del registry._runtimes[runtime.device]
        else:
            registry._runtimes[runtime.device] = before
