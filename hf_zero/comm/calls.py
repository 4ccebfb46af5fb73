"""Calls that all ranks must make, such as a save: a rank that waits in one, or for one, learns where the others are.

    rank 0   enter("save_checkpoint")   counts itself, waits for the others, and says after a while that it waits there
    rank 1   waits for rank 0 elsewhere, reads that, says so, and cannot continue either
    rank 2   has ended or failed (`process_group.py` records it), which ends the wait of the others

Everything goes through the job's store: the ranks that wait may be in a backend that answers nobody. A call that all
ranks make costs each of them two messages.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hf_zero.comm.ledger import ledger
from hf_zero.comm.process_group import (
    ENDED,
    FAILED,
    common_timeout,
    get_rank,
    get_world_size,
    is_initialized,
    store_of_job,
)
from hf_zero.log import logger

# Keys of the store. A call is named like "save_checkpoint 3": the third one.
_ENTERED, _ALL_HERE = "hf_zero/entered/{}", "hf_zero/all_here/{}"  # number of ranks in a call; set once all are
_HERE = "hf_zero/here/{}/{}"  # by call and rank
_WAITS = "hf_zero/waits"  # "0 save_checkpoint 3": the rank that has last noticed that it waits in a call
_ELSEWHERE = "hf_zero/elsewhere/{}"  # by call: "1 backward": a rank that waits for one in this call, in another one
TICK_S = 1.0
PATIENCE_S = 2.0  # until a rank tells the others that it waits in a call
SAYS_AFTER_S = 4.0  # until the log says so
_MAX_ASKED = 256  # ranks that are asked for one by one
_MAX_NAMED = 8

_FIND_DEAD: list[Callable[[], str]] = []  # return the ranks of this machine whose process has exited, as text
_numbers: Counter[str] = Counter()  # of calls so far, which is the same on all ranks


def find_dead_by(find: Callable[[], str]) -> None:
    """Ask `find` for ranks that have exited without a word, while this rank waits in a call."""
    _FIND_DEAD[:] = [find]


def enter(name: str) -> None:
    """Wait until all ranks have made this call.

    Raises:
        RuntimeError: one of them cannot: it has ended or failed, or waits for this rank in another call.
    """
    if not is_initialized() or get_world_size() == 1:
        return
    _numbers[name] += 1
    call, store = f"{name} {_numbers[name]}", store_of_job()
    store.set(_HERE.format(call, get_rank()), "")
    if store.add(_ENTERED.format(call), 1) == get_world_size():
        store.set(_ALL_HERE.format(call), "")
        return
    _Entry(name, call, store).wait()


class _Entry:
    """This rank waits at the beginning of a call."""

    def __init__(self, name: str, call: str, store: Any) -> None:
        self._name = name
        self._call = call
        self._store = store

    def wait(self) -> None:
        begin, timeout_s, has_said = time.monotonic(), common_timeout().total_seconds(), False
        while not self._all_are_here(min(TICK_S, timeout_s)):
            waited_s = time.monotonic() - begin
            self._look_at_others()
            if waited_s >= PATIENCE_S:
                self._store.set(_WAITS, f"{get_rank()} {self._call}")
            if waited_s >= SAYS_AFTER_S and not has_said:
                has_said = True
                logger.warning(
                    "this rank is in %s and waits for %s: call it on every rank (or a rank is slow; after %g seconds "
                    "this is an error)",
                    self._name,
                    self._absent(),
                    timeout_s,
                )
            if waited_s >= timeout_s:
                raise RuntimeError(
                    f"this rank is in {self._name}, and {self._absent()} has not responded for {timeout_s:g} seconds: "
                    f"call {self._name} on every rank"
                )

    def _all_are_here(self, wait_s: float) -> bool:
        try:
            self._store.wait([_ALL_HERE.format(self._call)], timedelta(seconds=wait_s))
        except RuntimeError:
            return bool(self._store.check([_ALL_HERE.format(self._call)]))  # raises if the store is gone
        return True

    def _look_at_others(self) -> None:
        """Raise if a rank cannot come. One that has said where it waits may have ended because of that."""
        key = _ELSEWHERE.format(self._call)
        if self._store.check([key]):
            rank, _, where = self._store.get(key).decode().partition(" ")
            raise self._error(f"rank {rank} waits for it {where}")
        other = _waiting(self._store)
        if other is not None and other.name != self._name:
            self._store.set(_ELSEWHERE.format(other.call), f"{get_rank()} in {self._name}")
            raise self._error(f"rank {other.rank} is in {other.name}")
        if self._store.check([ENDED]):
            rank = self._store.get(ENDED).decode()
            raise self._error(f"rank {rank} has reached the end of its program")
        if self._store.check([FAILED]):
            rank, _, error = self._store.get(FAILED).decode(errors="replace").partition(" ")
            raise RuntimeError(f"this rank waits in {self._name} for rank {rank}, which has failed: {error}")
        for find_dead in _FIND_DEAD:
            if dead := find_dead():
                raise RuntimeError(f"this rank waits in {self._name} for {dead}, which has exited")

    def _error(self, others: str) -> RuntimeError:
        return RuntimeError(
            f"ranks are in different calls: this rank is in {self._name}, but {others}. Call {self._name} on every "
            "rank, not below `if rank == 0`"
        )

    def _absent(self) -> str:
        world = get_world_size()
        if world > _MAX_ASKED:
            return f"{world - self._store.add(_ENTERED.format(self._call), 0)} of {world} ranks"
        absent = [rank for rank in range(world) if not self._store.check([_HERE.format(self._call, rank)])]
        more = f" and {len(absent) - _MAX_NAMED} others" if len(absent) > _MAX_NAMED else ""
        return f"rank{'s' * (len(absent) != 1)} {', '.join(map(str, absent[:_MAX_NAMED]))}{more}"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A rank that waits at the beginning of a call."""

    rank: int
    call: str

    @property
    def name(self) -> str:
        return self.call.rpartition(" ")[0]


def _waiting(store: Any) -> _Waiting | None:
    """The rank that has last said that it waits in a call, if it still does."""
    if not store.check([_WAITS]):
        return None
    rank, _, call = store.get(_WAITS).decode().partition(" ")
    return None if store.check([_ALL_HERE.format(call)]) else _Waiting(int(rank), call)


def raise_if_elsewhere(peers: Collection[int], purpose: str) -> None:
    """Raise if one of `peers`, for which this rank waits, itself waits for all ranks in a call."""
    with suppress(dist.DistNetworkError):  # the host of the store is gone, which the caller notices by itself
        other = _elsewhere(peers)
        if other is not None:
            where = f"{purpose}, in {ledger.current_phase}"
            store_of_job().set(_ELSEWHERE.format(other.call), f"{get_rank()} {where}")
            raise RuntimeError(f"ranks are in different calls: {_described(other)}. This rank waits for it {where}")


def _elsewhere(peers: Collection[int]) -> _Waiting | None:
    if not is_initialized():
        return None
    other = _waiting(store_of_job())
    return other if other is not None and other.rank in peers else None


def _described(other: _Waiting) -> str:
    return f"rank {other.rank} is in {other.name}: call it on every rank, not below `if rank == {other.rank}`"


class _Watch:
    """A thread that says where the others are while this process waits in a backend that answers nobody."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._peers: Collection[int] = ()
        self._is_running = False

    @contextmanager
    def waiting(self, peers: Collection[int]) -> Iterator[None]:
        """Context in which this rank waits for `peers`."""
        if not self._is_running:
            self._is_running = True
            threading.Thread(target=self._run, name="hf_zero-waits", daemon=True).start()
        self._peers, self._since = peers, time.monotonic()
        try:
            yield
        finally:
            self._since = None

    def _run(self) -> None:
        said = None
        with suppress(RuntimeError, ValueError):  # the store is gone
            while True:
                time.sleep(TICK_S)
                since = self._since
                if since is None or time.monotonic() - since < PATIENCE_S or since == said:
                    continue
                other = _elsewhere(self._peers)
                if other is not None and self._since == since:
                    said = since
                    logger.error("%s. This rank waits in %s", _described(other), ledger.current_phase)


_watch = _Watch()
waiting = _watch.waiting
