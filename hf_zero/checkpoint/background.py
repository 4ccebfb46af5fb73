"""Writes a checkpoint in the background, with the values at the time of the call.

    save_checkpoint   copies weights, buffers and counters at once; masters and optimizer states, which only an update
                      writes, get a place
    a thread          copies these during forward and backward; the next update waits for it
    `files.writer`    writes everything from shared memory, at the lowest priority

The memory is reused by the next save. If a rank's files contain values that other ranks own, the ranks of a host read
these from each other's memory. An error is raised at the next step.
"""

from __future__ import annotations

import atexit
import errno
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.arena import Arena
from hf_zero.checkpoint.files import stream
from hf_zero.checkpoint.files.stream import Arriving, Awaited, Streamed
from hf_zero.checkpoint.files.writer import MemoryPiece
from hf_zero.comm import Collectives, hosts
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import Event
from hf_zero.errors import CheckpointError
from hf_zero.log import logger
from hf_zero.offload.sub_group import READERS
from hf_zero.optim.updater import Updater

_THREAD_NAME = "hf_zero_save"
_untold: set[BackgroundSave] = set()


class Snapshot:
    """A snapshot of a training's state.

    Attributes:
        copied: set when masters and states may change again.
    """

    def __init__(self, arena: Arena, updater: Updater | None, constant: Iterable[Tensor] = ()) -> None:
        """
        Args:
            arena: memory of the snapshot, whose previous contents are dropped.
            constant: tensors that are only copied again after a write to them.
        """
        arena.rewind()
        # Its storage may also contain trained parameters.
        self._constant = {(each.data_ptr(), each.numel()) for each in constant}
        self.copied = threading.Event()
        self._arena = arena
        self._known: dict[object, Any] = {}
        self._later: list[tuple[Tensor, Tensor, int]] = []  # source, target, version
        self._written: dict[torch.device, Event] = {}  # by device, passes when its sources are written
        self._steady = _written_by_updates(updater) if updater is not None else frozenset()

    @property
    def is_described(self) -> bool:
        """Whether its files describe where values are, and each host reads its own (`torch_file.IN_PIECES`)."""
        return self._arena.outlives_process

    def keep(self, value: Any) -> Any:
        """Return `value` with the present values of all tensors; tied tensors stay tied. Collective if some tensors are
        still to arrive."""
        if isinstance(value, Tensor):
            key = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), str(value.device))
            if value.numel() == 0 or key not in self._known:
                self._known[key] = self._kept(value)
            return self._known[key]
        if isinstance(value, Arriving):
            for batch in value.batches:  # a batch is freed before the next one, which may reuse its addresses
                self._known.update((id(awaited), self._kept_stream(content)) for awaited, content in batch)
            return self.keep(value.content)
        if isinstance(value, Awaited):
            return self._known[id(value)]
        if isinstance(value, Streamed):
            if id(value) not in self._known:
                self._known[id(value)] = self._kept_stream(value)
            return self._known[id(value)]
        return stream.of_entries(value, self.keep)

    def share(self, buffers: Sequence[Tensor], collectives: Collectives) -> list[list[Tensor]]:
        """The buffers of all ranks, by rank: `write` may read those of this host, and describe those of others.
        Collective.

        Raises:
            OSError: on all ranks, if one has too little space.
        """
        problem, own = "", []
        try:
            own = [self._placed(buffer, buffer.dtype) for buffer in buffers]
        except OSError as error:
            problem = str(error)
        pieces = [(self._arena.piece(each), each.dtype) for each in own]
        host = hosts().of_rank[collectives.ranks[collectives.rank]]
        gathered: list[Any] = collectives.gather_objects((problem, pieces, host))
        for rank, (theirs, _, _) in enumerate(gathered):
            if theirs:
                raise OSError(errno.ENOSPC, f"rank {rank} has no memory for the asynchronous save: {theirs}")
        return [
            own if rank == collectives.rank else self._of_other(theirs, is_here=place == host)
            for rank, (_, theirs, place) in enumerate(gathered)
        ]

    def _of_other(self, pieces: Sequence[tuple[MemoryPiece, torch.dtype]], *, is_here: bool) -> list[Tensor]:
        if is_here:
            return [self._arena.of_other(piece, dtype) for piece, dtype in pieces]
        ends = {piece.path: piece.start + piece.num_bytes for piece, _ in pieces}  # places in a file are ascending
        return [self._arena.elsewhere(piece, ends[piece.path], dtype) for piece, dtype in pieces]

    def copy(self) -> None:
        """Copy tensors that only have a place so far.

        Raises:
            CheckpointError: if the program has written to them meanwhile.
        """
        try:
            with torch.no_grad():
                for device, after in self._written.items():
                    pairs = [(source, target) for source, target, _ in self._later if source.device == device]
                    runtime_of(device).copy_beside(pairs, after)
            if any(source._version != version for source, _, version in self._later):
                raise CheckpointError(
                    "this checkpoint",
                    "was not written: the program changed optimizer states while they were being saved",
                    "change them before save_checkpoint(), or after the next step()",
                )
        finally:
            self._later = []
            self.copied.set()

    def _kept(self, value: Tensor) -> Tensor:
        is_plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout == torch.strided
        if not is_plain or value.is_quantized or value.numel() * value.element_size() < self._arena.SMALL_BYTES:
            return value.detach().to("cpu", copy=True)
        return self._placed(value.detach().reshape(-1), value.dtype).view(value.shape)

    def _kept_stream(self, content: Streamed) -> Streamed:
        if not isinstance(content.parts, tuple):
            whole = self._arena.place(content.numel, content.dtype)
            stream.fill(whole, content.chunks())
            return stream.streamed(whole.view(content.shape))
        parts = tuple(
            part if self._arena.holds(part) or _is_one_value(part) else self._placed(part, content.dtype)
            for part in content.parts
        )
        return Streamed(content.dtype, content.shape, parts)

    def _placed(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor's place, which has its values now or when `copy` has ended."""
        target, storage = self._arena.place(source.numel(), dtype), source.untyped_storage().data_ptr()
        if storage in self._steady and not source.is_inference():
            self._later.append((source.detach(), target, source._version))
            if source.device not in self._written:
                self._written[source.device] = runtime_of(source.device).record()
        elif (source.data_ptr(), source.numel()) in self._constant and not source.is_inference():
            self._arena.update(target, source)
        else:
            target.copy_(source)
        return target


def _is_one_value(part: Tensor) -> bool:
    return part.numel() > 1 and part.stride() == (0,)


def _written_by_updates(updater: Updater) -> frozenset[int]:
    """Addresses of memory that nothing but an update writes: masters that are not the weights themselves, and optimizer
    states."""
    if not updater.stager.rests_in_memory:
        return frozenset()
    addresses, state = set(), updater.optimizer.state
    for sub_group in updater.sub_groups:
        stored = sub_group.stored
        masters = [] if sub_group.lp_param is None else [sub_group.master if stored is None else stored.master.resting]
        states = (value for tensor in sub_group.tensors for value in state.get(tensor.parameter, {}).values())
        kept = () if stored is None else (vector.resting for vector in stored.vectors.values())
        for value in (*masters, *states, *kept):
            if isinstance(value, Tensor) and value.numel() > 1:
                addresses.add(value.untyped_storage().data_ptr())
    return frozenset(addresses)


def num_bytes_of(value: Any) -> int:
    if isinstance(value, (Tensor, Streamed, Awaited)):
        return math.prod(value.shape) * value.dtype.itemsize
    if isinstance(value, Arriving):
        return num_bytes_of(value.content)
    if isinstance(value, Mapping):
        return sum(map(num_bytes_of, value.values()))
    return sum(map(num_bytes_of, value)) if type(value) in (list, tuple) else 0


class BackgroundSave:
    """Runs at most one save at a time in a thread, which finishes before the program exits.

    If a program's last save fails and no later call reports it, the program exits with an error (`_end_as_failed`).
    """

    def __init__(self, arena: Arena | None = None) -> None:
        self.arena = arena or Arena()
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def start(self, write: Callable[[], object], snapshot: Snapshot | None = None) -> None:
        """Run `write` in a thread once the snapshot is copied; waits for the previous save."""
        self.wait()

        def run() -> None:
            try:
                if snapshot is not None:
                    snapshot.copy()
                write()
            except CheckpointError as error:
                self._error = error
            except Exception as error:
                self._error = CheckpointError("background save", f"failed ({type(error).__name__}: {error})")
            if snapshot is not None:
                READERS.discard(snapshot.copied)
            if self._error is not None:
                _untold.add(self)

        # Not a daemon, so that the interpreter waits for it at exit.
        self._thread = threading.Thread(target=run, name=_THREAD_NAME, daemon=False)
        if snapshot is not None:
            READERS.add(snapshot.copied)
        if not self.arena.outlives_process:
            _replace_handler(signal.SIG_DFL, _finish_first)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            CheckpointError: if the last save failed and this has not been reported yet.
        """
        if self._thread is not None:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise the error of a failed save, once, without waiting."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            _replace_handler(_finish_first, signal.SIG_DFL)
            error = self.take_error()
            if error is not None:
                raise error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self.arena.close()

    def take_error(self) -> CheckpointError | None:
        """Return the unreported error, if any, and mark it as reported."""
        _untold.discard(self)
        error, self._error = self._error, None
        return error


def _finish_first(number: int, _frame: object) -> None:
    """Handler of SIGTERM, which launchers send before SIGKILL: finish a running save first."""
    for thread in threading.enumerate():
        if thread.name == _THREAD_NAME:
            thread.join()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _replace_handler(old: object, new: Any) -> None:
    """Handle SIGTERM if the program has no handler and one may be installed."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is old:
        signal.signal(signal.SIGTERM, new)


def _end_as_failed() -> None:
    """At exit, after all threads: fail if the last checkpoint was not written, because status 0 would imply it was."""
    errors = [save.take_error() for save in list(_untold)]
    for error in errors:
        logger.error("the program has ended, and its last checkpoint %s", error)
    if errors:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # an exception would be printed, and the status would stay 0


# Registered before there is a process group, because exit functions run in reverse order and the group must go first.
atexit.register(_end_as_failed)
