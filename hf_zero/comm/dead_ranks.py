"""Names the rank that died, where a back-end knows only that some connection was closed.

Every rank knows the others' processes. When an error of torch.distributed ends this one, those of them that ran on this
machine and have ended by then are named in the log, beside the traceback. Of other machines' those are named that have
not said in the job's store that they end, too. Our own exchange through shared memory names the rank in its errors, and
needs none of this.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from hf_zero.comm.process_group import releases_groups_at_exit
from hf_zero.log import logger

_OF_CONNECTIONS = re.compile(
    r"connection|broken pipe|timed? ?out|timeout|remote process|socket|gloo|nccl", re.IGNORECASE
)
_LEFT = "hf_zero/left/{}"  # in the store: this rank ends because of another one
_ENDED, _STOPPED = "ZX", "Tt"  # states of proc(5); a launcher may not have collected what has ended
_PATIENCE_S = 5.0  # between the end of a connection and that of its process


@dataclass(frozen=True)
class _Process:
    rank: int
    host: str
    place: str  # where its number means something: a machine, or a container on it
    pid: int


class _Ranks:
    """What this process knows of the others; empty where there are none."""

    def __init__(self) -> None:
        self.world: object = None
        self.rank = 0
        self.others: tuple[_Process, ...] = ()
        self.store: dist.Store | None = None
        releases_groups_at_exit(self)

    def release_groups(self) -> None:
        self.world = self.store = None


_known = _Ranks()


def remember_ranks(gather_objects: Callable[[object], list[object]]) -> None:
    """Learn of all processes, once for a process group. Collective."""
    if _known.world is dist.group.WORLD:
        return
    own = _Process(dist.get_rank(), os.uname().nodename, _place(), os.getpid())
    gathered = [process for process in gather_objects(own) if isinstance(process, _Process)]
    first = _known.world is None
    _known.world, _known.others = dist.group.WORLD, tuple(process for process in gathered if process.rank != own.rank)
    _known.rank, _known.store = own.rank, dist.distributed_c10d._get_default_store()
    if first:
        _stand_before(sys.excepthook)


def _stand_before(hook: Callable[..., None]) -> None:
    def name_the_dead(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        hook(kind, error, traceback)
        if isinstance(error, RuntimeError) and _OF_CONNECTIONS.search(str(error)):
            with suppress(RuntimeError):  # the store may have been the dead rank's
                if _known.store is not None:
                    _known.store.set(_LEFT.format(_known.rank), "")
            logger.error("%s", describe_dead(_known.others, _known.store))

    sys.excepthook = name_the_dead


def describe_dead(others: Sequence[_Process], store: dist.Store | None = None, patience_s: float = _PATIENCE_S) -> str:
    """Which ranks have ended, as far as this machine and what others have said in `store` can tell."""
    here = [process for process in others if process.place == _place()]
    deadline = time.monotonic() + patience_s
    while not (dead := [process for process in here if _state(process.pid) in _ENDED]) and time.monotonic() < deadline:
        time.sleep(0.02)
    if dead:
        return f"this rank ends because another one did: {_names(dead)} on {dead[0].host} is gone"
    stopped = [process for process in here if _state(process.pid) in _STOPPED]
    if stopped:
        return f"one rank does not answer: {_names(stopped)} on {stopped[0].host} is stopped (SIGSTOP, or a debugger)"
    away = [process for process in others if process.place != _place()]
    silent = _silent(away, store)
    if silent:
        names = ", ".join(f"rank {process.rank} on {process.host} (process {process.pid})" for process in silent)
        return f"all ranks of this machine are alive: {names} has ended, or does not answer"
    if away:
        hosts = ", ".join(sorted({process.host for process in away}))
        return f"all ranks of this machine are alive: one on {hosts} has ended, or does not answer"
    return "all other ranks are alive: one of them does not answer, or calls another collective"


def _silent(others: Sequence[_Process], store: dist.Store | None) -> list[_Process]:
    """Who has not said that it ends because of another rank."""
    try:
        return [] if store is None else [each for each in others if not store.check([_LEFT.format(each.rank)])]
    except RuntimeError:  # who keeps the store does not answer
        return []


def _names(processes: Sequence[_Process]) -> str:
    return ", ".join(f"rank {process.rank} (process {process.pid})" for process in processes)


def _state(pid: int) -> str:
    """Of a process of this machine, as the kernel has it; one that is gone counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def _place() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return os.uname().nodename
