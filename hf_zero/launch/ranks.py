"""Starts ranks on this host, for the launcher itself, and as a program on the hosts of a job.

python -m hf_zero.launch.ranks JOB --host NAME     all ranks of this host; pdsh runs it once per host
python -m hf_zero.launch.ranks JOB                 one rank, given by the variables that mpirun or srun sets

`Supervisor` runs the ranks of one node: it forwards their output and incoming signals, and when a rank fails, ends or
restarts all of them.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any, BinaryIO

from hf_zero.launch import LaunchError, shown
from hf_zero.launch.children import (
    CHUNK_BYTES,
    Failure,
    InterruptFilter,
    SignalInbox,
    Stream,
    Tail,
    is_deserted,
    is_stopped,
    signal_group,
    start,
    watch,
)
from hf_zero.launch.job import Job, RankCommand
from hf_zero.launch.restarts import ForkedRank, Restarts
from hf_zero.network import name_gloo_interface
from hf_zero.rank_environment import RankEnvironment, find_rank_environment

GRACE_S = 15.0  # between asking a rank to end and killing it
_TICK_S = 0.2
_TICK_OF_RESTARTS_S = 0.05  # stopped ranks are found by polling
_LAST_OUTPUT_S = 1.0  # limit for reading the output of an ended rank, whose children may keep the pipe open


@dataclass
class _Rank:
    """A rank's process with its log, output and state."""

    command: RankCommand
    process: subprocess.Popen[bytes] | ForkedRank
    log: BinaryIO | None
    watch: int | None  # a descriptor that becomes readable when the process ends
    tail: Tail = field(default_factory=Tail)
    filter: InterruptFilter = field(default_factory=InterruptFilter)
    open_pipes: int = 2
    stopped_at: float | None = None  # when it was first seen stopped


class Supervisor:
    """Runs the ranks of one node from start to end."""

    def __init__(
        self, host: str, *, log_path: Callable[[int], str | None], is_attached: bool, restarts: Restarts | None
    ) -> None:
        """`is_attached`: the process that reads our output started us, and the ranks end when it closes the pipe."""
        self._restarts = restarts
        self._peers = None if restarts is None else restarts.peers
        self._is_again, self._is_over = False, False  # ranks have run before; all hosts have finished
        self._host = host
        self._log_path = log_path
        self._is_attached = is_attached
        self._streams = {1: Stream(1), 2: Stream(2)}
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        self._alive: set[int] = set()
        self._first: Failure | None = None
        self._signal: int | None = None
        self._kill_at: float | None = None

    def run(self, commands: Sequence[RankCommand], report: Callable[[Failure], None]) -> int:
        """Run all ranks and return the exit status for a shell. `report` gets the first failure at the end."""
        with SignalInbox() as inbox:
            self._selector.register(inbox.descriptor, selectors.EVENT_READ, lambda: self._heed(inbox))
            if (peers := self._peers) is not None:
                self._selector.register(peers.descriptor, selectors.EVENT_READ, lambda: self._heed_peers(peers))
            try:
                self._run_once(commands)
                while self._restarts is not None and self._first is not None and self._signal is None:
                    problem = "another host has given up" if self._is_over else self._restarts.refusal(self._first)
                    if problem:
                        sys.stderr.write(f"hf-zero launch: {problem}\n")
                        if self._peers is not None:
                            self._peers.say("stop", self._first)
                        break
                    sys.stderr.write(f"{self._first.summary()}: restarting all ranks{self._restarts.described()}\n")
                    self._kill_all()
                    self._ranks, self._first, self._kill_at, self._is_again = [], None, None, True
                    self._run_once(commands)
            finally:
                self._kill_all()
                if self._restarts is not None:
                    self._restarts.close()
                if self._peers is not None:
                    self._peers.close()
        if self._signal == signal.SIGINT:
            count = len(commands)
            sys.stderr.write(f"hf-zero launch: interrupted; {count} rank{'s' * (count != 1)} of {self._host} ended\n")
        if self._signal is not None:
            return 128 + self._signal
        if self._first is None:
            return 0
        report(self._first)
        return self._first.exit_status

    def _run_once(self, commands: Sequence[RankCommand]) -> None:
        if self._restarts is not None:
            commands = self._restarts.renewed(commands, self._wait, again=self._is_again)
        for index, command in enumerate(commands):
            self._start(index, command)
        while self._alive:
            self._turn()
        if self._peers is not None:
            self._tell(self._peers)
        if self._restarts is not None and self._first is not None:
            for rank in self._ranks:  # their children would keep the pipes open
                signal_group(rank.process.pid, signal.SIGKILL)
        self._drain()

    def _tell(self, peers: Any) -> None:
        """Tell the other hosts how this host's ranks ended; after success, wait until all hosts have finished."""
        if self._first is not None and self._first.host == self._host:
            peers.say("end", self._first)
        elif self._first is None and self._signal is None:
            peers.say("done")
            while self._first is None and not self._is_over and self._wait():
                self._heed_peers(peers)

    def _wait(self) -> bool:
        """Handle events for one tick while no ranks run. Returns False after a signal."""
        for key, _ in self._selector.select(_TICK_S):
            if key.fd != getattr(self._peers, "descriptor", None):
                key.data()
        return self._signal is None

    def _heed_peers(self, peers: Any) -> None:
        for message in peers.take():
            if message["say"] in ("end", "stop"):
                self._fail(Failure(**message["failure"]))
            elif message["say"] == "lost":
                self._fail(Failure.of_host("the first host"))
            self._is_over |= message["say"] in ("over", "stop")

    def _fail(self, failure: Failure) -> None:
        """Kill the ranks of this host because another host has failed."""
        if self._first is None:
            self._first = failure
            self._end(signal.SIGKILL)

    def _start(self, index: int, command: RankCommand) -> None:
        path = self._log_path(command.rank)
        log = _open_log(path) if path else None
        process = start(command) if self._restarts is None else self._restarts.start(command)
        rank = _Rank(command, process, log, watch(process.pid))
        self._ranks.append(rank)
        self._alive.add(index)
        for pipe, number in ((process.stdout, 1), (process.stderr, 2)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, partial(self._hear, rank, pipe, self._streams[number]))
        if rank.watch is not None:
            self._selector.register(rank.watch, selectors.EVENT_READ, lambda: self._look_at(index))

    def _turn(self) -> None:
        events = self._selector.select(_TICK_S if self._restarts is None else _TICK_OF_RESTARTS_S)
        for key, _ in events:
            key.data()
        if not events:
            self._flush()
        for index in sorted(self._alive):
            if self._ranks[index].watch is None:
                self._look_at(index)
        if self._restarts is not None:
            self._end_stopped(self._restarts.stopped_s)
            if self._kill_at is None:
                self._restarts.stand_by([rank.command for rank in self._ranks])
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self._send(signal.SIGKILL)
        if self._is_attached and self._kill_at is None and is_deserted(1):
            self._signal = signal.SIGHUP
            self._end(signal.SIGTERM)

    def _look_at(self, index: int) -> None:
        """Check whether a rank has ended; the first one that failed ends the others."""
        rank = self._ranks[index]
        code = rank.process.poll()
        if code is None or index not in self._alive:
            return
        self._alive.discard(index)
        if rank.watch is not None:
            self._selector.unregister(rank.watch)
            os.close(rank.watch)
        if code == 0 or self._kill_at is not None:
            return
        if self._restarts is None or code > 0:  # do not wait for the last output of a killed rank
            self._drain(rank)
        log = self._log_path(rank.command.rank)
        self._first = Failure(rank.command.rank, self._host, code, rank.tail.text(), log)
        # With restarts, ranks continue from states kept in memory, so that they need no time to shut down.
        self._end(signal.SIGTERM if self._restarts is None else signal.SIGKILL)

    def _end_stopped(self, after_s: float) -> None:
        """Kill ranks that have been stopped (SIGSTOP) for longer than `after_s`, because the others wait for them."""
        for rank in (self._ranks[index] for index in self._alive):
            if not is_stopped(rank.process.pid):
                rank.stopped_at = None
            elif rank.stopped_at is None:
                rank.stopped_at = time.monotonic()
            elif time.monotonic() - rank.stopped_at > after_s:
                sys.stderr.write(f"hf-zero launch: rank {rank.command.rank} has been stopped for {after_s:g} s\n")
                signal_group(rank.process.pid, signal.SIGKILL)

    def _heed(self, inbox: SignalInbox) -> None:
        for number in inbox.take():
            if self._signal is not None:
                self._send(signal.SIGKILL)  # the second signal forces the end
                continue
            self._signal = number
            self._end(number)

    def _end(self, number: int) -> None:
        self._kill_at = time.monotonic() + GRACE_S
        self._send(number)

    def _send(self, number: int) -> None:
        for index in self._alive:
            signal_group(self._ranks[index].process.pid, number)

    def _kill_all(self) -> None:
        """Kill all ranks with their child processes, and close their logs."""
        for rank in self._ranks:
            signal_group(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
            if rank.log is not None:
                rank.log.close()

    def _drain(self, only: _Rank | None = None) -> None:
        """Read the remaining output in the pipes."""
        deadline = time.monotonic() + _LAST_OUTPUT_S
        ranks = self._ranks if only is None else [only]
        while any(rank.open_pipes for rank in ranks) and time.monotonic() < deadline:
            for key, _ in self._selector.select(_TICK_S):
                if isinstance(key.data, partial):  # of a pipe
                    key.data()
        for rank in ranks:
            self._streams[2].write(id(rank), rank.filter.end())
        self._flush()

    def _flush(self) -> None:
        for stream in self._streams.values():
            stream.flush()

    def _hear(self, rank: _Rank, pipe: IO[bytes], stream: Stream) -> None:
        """Read from a pipe in which a rank has written output, or which it has closed."""
        if pipe.closed:
            return  # already drained
        try:
            chunk = os.read(pipe.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            rank.open_pipes -= 1
            self._selector.unregister(pipe)
            pipe.close()
            return
        rank.tail.add(chunk)
        if rank.log is None and self._signal == signal.SIGINT and stream is self._streams[2]:
            stream.write(id(rank), rank.filter.add(chunk))
        elif rank.log is None:
            stream.write(id(rank), chunk)
        else:
            rank.log.write(chunk)


def _open_log(path: str) -> BinaryIO:
    try:
        return open(path, "ab", buffering=0)  # append, because ranks may restart
    except OSError as error:
        raise LaunchError(f"the log {shown(path)} cannot be written: {error}") from None


def run_ranks(
    job: Job,
    host: str,
    commands: Sequence[RankCommand],
    report: Callable[[Failure], None],
    *,
    is_attached: bool = False,
    restarts: Restarts | None = None,
) -> int:
    """Run these ranks; returns the exit status."""
    for command in commands:
        name_gloo_interface(command.environment, [name for name in job.world.names if name != host])
    paths = _log_paths(job.log_folder)
    return Supervisor(host, log_path=paths, is_attached=is_attached, restarts=restarts).run(commands, report)


def report_to_launcher(token: str, failure: Failure) -> None:
    """Report a failure to the launcher on another host, which reads the output of this process."""
    sys.stderr.buffer.write(b"\n" + failure.mark(token))
    sys.stderr.buffer.flush()


def report_to_user(failure: Failure) -> None:
    sys.stderr.write(failure.message())
    sys.stderr.flush()


def _log_paths(folder: str | None) -> Callable[[int], str | None]:
    """Log path of each rank; like in DeepSpeed's launcher, each launch has its own file names."""
    if folder is None:
        return lambda rank: None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--enable_each_rank_log {shown(folder)} is not a writable folder: {error}") from None
    beginning = time.strftime("%Y%m%d%H%M%S")
    return lambda rank: os.path.join(str(folder), f"{beginning}_rank{rank}.log")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hf_zero.launch.ranks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--host", help="name of this host in the hostfile; leave out if mpirun or srun starts each rank"
    )
    parser.add_argument("job", help="the job as encoded by hf-zero launch")
    options = parser.parse_args(words)
    host = options.host or socket.gethostname()
    try:
        job = Job.decode(options.job)
        report = partial(report_to_launcher, job.token)
        if options.host is None:
            command = rank_command(job, find_rank_environment(os.environ))
            _enter(job.folder, host)
            return run_ranks(job, host, [command], report)
        if host not in job.world.names:
            raise LaunchError(f"{shown(host)} is not a host of this job, which has {', '.join(job.world.names)}")
        _enter(job.folder, host)
        return run_ranks(job, host, job.on_node(job.world.names.index(host)), report, is_attached=True)
    except (LaunchError, ValueError) as error:
        sys.stderr.write(f"hf-zero launch on {host}: {error}\n")
        return 2


def rank_command(job: Job, given: RankEnvironment | None) -> RankCommand:
    """The command for the rank that MPI's or Slurm's variables describe.

    Raises:
        LaunchError: if processes are not placed as requested, because ranks would then share devices.
    """
    if given is None:
        raise LaunchError("mpirun or srun must set the rank, but no OMPI_*, PMI_* or SLURM_* variables are set")
    if given.world_size != job.world.num_ranks:
        raise LaunchError(f"{given.source} has started {given.world_size} processes instead of {job.world.num_ranks}")
    place = list(job.world.places())[given.rank]
    if given.local_rank != place.local_rank:
        raise LaunchError(
            f"{given.source} has given rank {given.rank} local rank {given.local_rank} instead of {place.local_rank} "
            f"on {job.world.names[place.node_rank]}: leave placement to hf-zero launch"
        )
    return job.of_rank(given.rank, given.first_host)


def _enter(folder: str, host: str) -> None:
    """Change into the folder that the job was started from."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise LaunchError(
            f"the job was started in {shown(folder)}, which cannot be used on {host}: {error.strerror}. Put it on "
            "a file system that the hosts share, or start from a folder that exists on all of them"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
