"""Groups of ranks that are reused from job to job: real processes with gloo that import everything only once.

    with LastingRanks(play, modules) as ranks:        play(job, rank, folder), at module level: the work of a rank
        reports, log = ranks.run(2, job, deadline_s)  on two ranks

A group that hangs, dies or raises is killed, and its ranks' stacks are logged; the next job gets a new group.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.fork_server import START_S, Child, fork_server
from tests.support.ranks import free_port, redirect_output

REPORT_S = 2.0  # after the first failure, for the other ranks to report theirs
LOG_CHARACTERS = 20_000
NEVER = timedelta(hours=1)  # ranks wait for each other until they are killed, so that a deadlock is visible

Play = Callable[[Any, int, str], Any]  # (job, rank, a folder of the group) -> the rank's result


@dataclass(frozen=True)
class RankReport:
    """The end of a rank: its result, or the text of its exception; without either it is gone or still running."""

    result: Any = None
    failure: str = ""
    is_gone: bool = False

    @property
    def is_silent(self) -> bool:
        return self.result is None and not self.failure and not self.is_gone


class LastingRanks:
    """Keeps one group of processes per world size. Use it as a context manager, so that no process is left behind."""

    def __init__(
        self, play: Play, modules: tuple[str, ...], warm_up: Callable[[int], Any] | None = None, most_jobs: int = 0
    ) -> None:
        """
        Args:
            modules: imported in advance by all ranks.
            warm_up: world -> a job that every new group runs first, so that initialization does not count as job time.
            most_jobs: jobs per group before it is replaced by a new one; 0: no limit.
        """
        self._play = play
        self._modules = modules
        self._warm_up = warm_up
        self._most_jobs = most_jobs
        self._groups: dict[int, _Group] = {}

    def __enter__(self) -> LastingRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, world: int, job: Any, deadline_s: float) -> tuple[list[RankReport], str]:
        """Runs `job` on `world` ranks; the log is empty unless one of them has failed."""
        group = self._groups.pop(world, None)
        if group is None:
            group = _Group(world, self._play, self._modules)
            if self._warm_up is not None:
                group.start(group.run(self._warm_up(world), START_S))
        try:
            reports = group.run(job, deadline_s)
            is_fine = all(report.result is not None for report in reports)
            log = "" if is_fine else group.describe(reports)
        except BaseException:
            group.kill()
            raise
        if is_fine and group.num_jobs != self._most_jobs:
            self._groups[world] = group
        else:
            group.kill()
        return reports, log

    def close(self) -> None:
        for group in self._groups.values():
            group.kill()
        self._groups.clear()


@dataclass(frozen=True)
class _Seat:
    """A rank's parameters, sent to it by pickle."""

    rank: int
    world: int
    port: int
    folder: str
    play: Play


@dataclass(frozen=True)
class _Job:
    job: Any
    patience_s: float  # a rank that is still busy after this time has lost its parent, and exits


class _Group:
    """The processes of one world."""

    def __init__(self, world: int, play: Play, modules: tuple[str, ...]) -> None:
        self.num_jobs = 0
        self._folder = tempfile.mkdtemp(prefix="lasting-")
        port = free_port()
        seats = [_Seat(rank, world, port, self._folder, play) for rank in range(world)]
        self._ranks: list[Child] = fork_server(modules).fork(_rank_main, seats)
        self._pipes = [rank.pipe for rank in self._ranks]
        self._log_starts = [0] * world
        self.start(self._collect(START_S))

    def start(self, reports: list[RankReport]) -> None:
        """Continues if these reports are successful, else raises."""
        if any(report.result is None for report in reports):
            log = self.describe(reports)
            self.kill()
            raise RuntimeError(f"{len(self._ranks)} ranks did not start: {reports}\n{log}")

    def run(self, job: Any, deadline_s: float) -> list[RankReport]:
        self.num_jobs += 1
        self._log_starts = [self._log(rank).stat().st_size for rank in range(len(self._pipes))]
        message = pickle.dumps(_Job(job, 3 * deadline_s + START_S))
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # its report will say that it is gone
                pipe.send_bytes(message)
        return self._collect(deadline_s)

    def _collect(self, deadline_s: float) -> list[RankReport]:
        """One report per rank: as they arrive, until the deadline, or a little after the first failure."""
        reports = [RankReport() for _ in self._pipes]
        pending = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + deadline_s
        while pending and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(pending), timeout=left):
                assert isinstance(pipe, Connection)
                rank = pending.pop(pipe)
                try:
                    reports[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    reports[rank] = RankReport(is_gone=True)
                if reports[rank].result is None:
                    deadline = min(deadline, time.monotonic() + REPORT_S)
        return reports

    def describe(self, reports: list[RankReport]) -> str:
        """The output of all ranks, and the stacks of those that are still running."""
        for rank, report in zip(self._ranks, reports):
            if report.is_silent:
                rank.signal(signal.SIGUSR1)
        if any(report.is_silent for report in reports):
            time.sleep(0.3)  # for them to write their stacks
        return "\n".join(self._output(rank) for rank in range(len(self._ranks)))

    def _output(self, rank: int) -> str:
        text = ""
        if self._log(rank).exists():
            text = self._log(rank).read_bytes()[self._log_starts[rank] :].decode(errors="replace")
        return f"--- rank {rank}\n{text[-LOG_CHARACTERS:]}"

    def _log(self, rank: int) -> Path:
        return Path(self._folder) / f"rank{rank}.log"

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def _rank_main(seat: _Seat, pipe: Connection) -> None:
    """A rank: receives jobs and sends reports, until the parent is gone or something fails."""
    redirect_output(Path(seat.folder) / f"rank{seat.rank}.log")
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    faulthandler.dump_traceback_later(START_S, exit=True, file=sys.stderr)
    warnings.simplefilter("ignore")
    _join(seat)
    pipe.send_bytes(pickle.dumps(RankReport("ready")))
    faulthandler.cancel_dump_traceback_later()
    while True:
        try:
            job: _Job = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)
        faulthandler.dump_traceback_later(job.patience_s, exit=True, file=sys.stderr)
        report = _run(seat, job)
        sys.stdout.flush()
        with suppress(BrokenPipeError):
            pipe.send_bytes(pickle.dumps(report))
        faulthandler.cancel_dump_traceback_later()


def _join(seat: _Seat) -> None:
    import torch
    import torch.distributed as dist

    place = {"RANK": seat.rank, "LOCAL_RANK": seat.rank, "WORLD_SIZE": seat.world, "LOCAL_WORLD_SIZE": seat.world}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(seat.port)}
    torch.set_num_threads(1)
    method = f"file://{seat.folder}/rendezvous"
    dist.init_process_group("gloo", init_method=method, rank=seat.rank, world_size=seat.world, timeout=NEVER)


def _run(seat: _Seat, job: _Job) -> RankReport:
    try:
        return RankReport(seat.play(job.job, seat.rank, seat.folder))
    except BaseException:  # noqa: BLE001 (whatever ends a rank is reported)
        return RankReport(failure=traceback.format_exc())
