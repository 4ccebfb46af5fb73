"""How many micro-batches each rank has begun, for errors about ranks that wait for each other in vain.

Every rank writes its count to the job's store when a micro-batch begins: one message that nothing waits for. They are
only read after an error. Ranks with different numbers of batches cannot be told from a slow rank otherwise, because the
rank that others wait for does not answer.
"""

from __future__ import annotations

import re
import time
import weakref
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from hf_zero.comm.process_group import ENDED, FAILED, get_rank, get_world_size, is_initialized

_COUNT, _UNEVEN = "hf_zero/micro_batches/{}/{}", "hf_zero/uneven"  # keys of the store
_IN_VAIN = re.compile(r"has not responded|timed? ?out|timeout|in different calls|in another call", re.IGNORECASE)
_CLOSED = re.compile(r"connection|broken pipe|remote process|socket|gloo|nccl|has exited", re.IGNORECASE)
_PATIENCE_S = 0.2  # a rank records its reason before its connections close
_MAX_NAMED = 8


class MicroBatchCounts:
    """The counts of one engine, which has the same number on all ranks."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._told = 0
        _ALL.add(self)

    def begin(self, count: int) -> None:
        """Tell the other ranks that this rank is in its micro-batch number `count`, from 1."""
        if count == self._told:
            return
        self._told = count
        if (store := _store()) is not None:
            with suppress(RuntimeError):  # the host of the store is gone; the next collective says so
                store.set(_COUNT.format(self._number, get_rank()), str(count))

    def explain(self, error: Exception) -> None:
        """Add the counts to an error of waiting for other ranks, if they differ."""
        in_vain, store = _IN_VAIN.search(str(error)) is not None, _store()
        if store is None or not (in_vain or _CLOSED.search(str(error))) or getattr(error, "is_explained", False):
            return
        error.is_explained = True  # type: ignore[attr-defined]  # a second look would only take time
        with suppress(RuntimeError):  # the host of the store is gone
            if not in_vain and not _is_uneven(store):
                return
            counts = self._counts(store)
            if len(set(counts.values())) > 1:
                store.set(_UNEVEN, "")
                error.args = (f"{error}. {describe(counts, get_rank())}",)

    def _counts(self, store: Any) -> dict[int, int]:
        keys = {rank: _COUNT.format(self._number, rank) for rank in range(get_world_size())}
        return {rank: int(store.get(key)) if store.check([key]) else 0 for rank, key in keys.items()}


_ALL: weakref.WeakSet[MicroBatchCounts] = weakref.WeakSet()


def explain(error: BaseException) -> None:
    """Like `MicroBatchCounts.explain`, for an error outside of an engine's phases."""
    for progress in list(_ALL):
        if isinstance(error, RuntimeError):
            progress.explain(error)


def _is_uneven(store: Any) -> bool:
    """Whether a closed connection is that of a rank that has waited in vain, or has reached the end of its program.

    A rank with an error of its own, or one that was killed, leaves connections behind, too: its batches are not the
    cause.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while not store.check([_UNEVEN]) and not store.check([FAILED]):
        if store.check([ENDED]):
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return bool(store.check([_UNEVEN]))


def describe(counts: dict[int, int], own: int) -> str:
    """Describe different numbers of micro-batches, by rank, to rank `own`."""
    most = max(counts.values())
    behind = {rank: count for rank, count in counts.items() if count < most}
    named = [f"{count} on rank {rank}" for rank, count in sorted(behind.items())[:_MAX_NAMED]]
    more = f", fewer on {len(behind) - _MAX_NAMED} others" if len(behind) > _MAX_NAMED else ""
    ahead = sorted(counts.keys() - behind.keys())
    where = f"rank {ahead[0]}" if len(ahead) == 1 else f"{len(ahead)} ranks"
    if own in behind:
        who = "this rank has"
    elif len(behind) > 1:
        who = "these ranks have"
    else:
        who = f"rank {min(behind)} has"
    return (
        f"Micro-batches begun: {most} on {where}, {', '.join(named)}{more}. Probably {who} fewer batches than the "
        "others, or a batch was skipped there (or it is still busy): every rank needs the same number of batches "
        "(docs/troubleshooting.md)"
    )


def _store() -> Any:
    """The store of the job, or None for a single rank."""
    if not is_initialized() or get_world_size() == 1:
        return None
    return dist.distributed_c10d._get_default_store()
