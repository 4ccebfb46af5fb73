"""Runs hostile programs on real processes with gloo. Groups of ranks live on from program to program.

A group that hangs, dies or raises is killed, with what its ranks were doing in the report, and the next program gets a
new one. A runner is anything with `run(program) -> Verdict`.
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
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Protocol

from tests.hostile.body import MakeEngine, RankResult, make_zero_engine, run_rank
from tests.hostile.nursery import START_S, Child, nursery
from tests.hostile.spec import Forward, Micro, Program, RankMicro
from tests.hostile.verdicts import RankReport, Verdict, judge
from tests.support.ranks import free_port, redirect_output

DEADLINE_S = 20.0
SETTLE_S = 2.0  # once a rank has failed: for the others to say so as well
# Run by every new group, so that no deadline is spent on imports.
WARM_UP = Program(
    seed=0,
    world=0,
    stage=3,
    order="same",
    width=1,
    modules=(),
    shapes=((2,),),
    steps=((Micro((RankMicro((Forward(seed=0, rows=1, calls=()),)),) * 8),),),
)
LOG_CHARACTERS = 20_000
NEVER = timedelta(hours=1)  # ranks wait for each other until they are killed, so that a deadlock shows as one


class Runner(Protocol):
    """One way to run a program."""

    def run(self, program: Program) -> Verdict: ...


class ProcessRunner:
    """Keeps one group of processes per world size. Use it as a context, so that no process is left behind."""

    def __init__(self, make_engine: MakeEngine = make_zero_engine, deadline_s: float = DEADLINE_S) -> None:
        self._make_engine = make_engine
        self._deadline_s = deadline_s
        self._groups: dict[int, _Group] = {}

    def __enter__(self) -> ProcessRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, program: Program, deadline_s: float | None = None) -> Verdict:
        """Run `program` on its ranks; the verdict of a failure holds what every rank was doing."""
        group = self._groups.pop(program.world, None)
        if group is None:
            group = _Group(program.world, self._make_engine)
        try:
            reports = group.run(program, deadline_s or self._deadline_s)
            is_fine = all(report.result is not None for report in reports)
            log = "" if is_fine else group.describe(reports)
        except BaseException:
            group.kill()
            raise
        if is_fine:
            self._groups[program.world] = group
        else:
            group.kill()
        return judge(program, reports, log)

    def close(self) -> None:
        for group in self._groups.values():
            group.kill()
        self._groups.clear()


@dataclass(frozen=True)
class _Seat:
    """What a rank needs to know; travels to it by pickle."""

    rank: int
    world: int
    port: int
    folder: str
    make_engine: MakeEngine


@dataclass(frozen=True)
class _Job:
    program: str  # JSON
    patience_s: float  # a rank that is still at it then has lost its parent, and ends by itself


class _Group:
    """The processes of one world."""

    def __init__(self, world: int, make_engine: MakeEngine) -> None:
        self._folder = tempfile.mkdtemp(prefix="hostile-")
        port = free_port()
        seats = [_Seat(rank, world, port, self._folder, make_engine) for rank in range(world)]
        self._ranks: list[Child] = nursery().fork(_rank_main, seats)
        self._pipes = [rank.pipe for rank in self._ranks]
        self._log_starts = [0] * world
        started = self._collect(START_S)
        if any(report.result is None for report in started):
            log = self.describe(started)
            self.kill()
            raise RuntimeError(f"{world} ranks did not start: {started}\n{log}")

    def run(self, program: Program, deadline_s: float) -> list[RankReport]:
        self._log_starts = [self._log(rank).stat().st_size for rank in range(len(self._pipes))]
        job = pickle.dumps(_Job(program.to_json(), 3 * deadline_s + START_S))
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # its report will say that it is gone
                pipe.send_bytes(job)
        return self._collect(deadline_s)

    def _collect(self, deadline_s: float) -> list[RankReport]:
        """A report of every rank: as they arrive, until the deadline, or a little after the first failure."""
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
                    deadline = min(deadline, time.monotonic() + SETTLE_S)
        return reports

    def describe(self, reports: list[RankReport]) -> str:
        """The output of all ranks, and where those that are still running stand."""
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
    """A rank: programs in, reports out, until the parent is gone or something has failed."""
    redirect_output(Path(seat.folder) / f"rank{seat.rank}.log")
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    faulthandler.dump_traceback_later(START_S, exit=True, file=sys.stderr)
    warnings.simplefilter("ignore")
    _join(seat)
    for optimizer in ("sgd", "adamw"):
        run_rank(replace(WARM_UP, optimizer=optimizer), seat.rank, make_zero_engine, seat.folder)
    pipe.send_bytes(pickle.dumps(RankReport(RankResult((), (), {}))))  # ready
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
        result = run_rank(Program.from_json(job.program), seat.rank, seat.make_engine, seat.folder)
        return RankReport(result)
    except BaseException:  # noqa: BLE001 (whatever ends a rank is reported)
        return RankReport(failure=traceback.format_exc())
