"""Starts ranks on this host, for the launcher itself, and as a program on the hosts of a job.

python -m hf_zero.launch.ranks JOB --host NAME     all ranks of this host; pdsh runs it once per host
python -m hf_zero.launch.ranks JOB                 one rank, given by the variables that mpirun or srun sets

`Supervisor` runs the ranks of one node: it forwards their output and incoming signals, and when a rank fails, ends all
of them. The extra `resilience` derives one that restarts them. It is not torch's elastic agent, with which ranks begin
only after one more import of torch: docs/architecture.md has figures, and what the agent does otherwise.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO, Protocol

from hf_zero.launch import LaunchError, shown
from hf_zero.launch.children import (
    CHUNK_BYTES,
    Failure,
    Guard,
    InterruptFilter,
    SignalInbox,
    Stream,
    Tail,
    is_deserted,
    signal_group,
    start,
    watch,
)
from hf_zero.launch.job import Job, RankCommand
from hf_zero.network import name_gloo_interface
from hf_zero.rank_environment import RankEnvironment, find_rank_environment

_LAST_OUTPUT_S = 1.0  # limit for reading the output of an ended rank, whose children may keep the pipe open


class RankProcess(Protocol):
    """The part of `subprocess.Popen` that a supervisor needs."""

    @property
    def pid(self) -> int: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    @property
    def stderr(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self) -> int | None: ...


@dataclass
class Rank:
    """A rank's process with its log and output."""

    command: RankCommand
    process: RankProcess
    log: BinaryIO | None
    watch: int | None  # a descriptor that becomes readable when the process ends
    tail: Tail = field(default_factory=Tail)
    filter: InterruptFilter = field(default_factory=InterruptFilter)
    open_pipes: int = 2


class Supervisor:
    """Runs the ranks of one node from start to end.

    Attributes:
        first: the first failure.
        signal: the signal that ends the ranks.
    """

    tick_s = 0.2
    grace_s = 15.0  # between asking ranks to end and killing them
    ends_others_by = signal.SIGTERM  # when a rank has failed

    def __init__(
        self, host: str, *, log_path: Callable[[int], str | None] = lambda rank: None, is_attached: bool = False
    ) -> None:
        """`is_attached`: the process that reads our output started us, and the ranks end when it closes the pipe."""
        self.host, self.log_path = host, log_path
        self._is_attached = is_attached
        self.streams = {number: self.stream(number) for number in (1, 2)}
        self.selector = selectors.DefaultSelector()
        self.ranks: list[Rank] = []
        self.alive: set[int] = set()
        self.first: Failure | None = None
        self.signal: int | None = None
        self.kill_at: float | None = None

    def run(self, commands: Sequence[RankCommand], report: Callable[[Failure], str]) -> int:
        """Run all ranks, print the first failure last, and return the exit status for a shell."""
        with SignalInbox() as inbox, Guard() as self._guard:
            self.selector.register(inbox.descriptor, selectors.EVENT_READ, lambda: self._heed(inbox))
            try:
                self.run_all(commands)
                self.drain()
            finally:
                self.kill_all()
                self.close()
        if self.signal is not None:
            return 128 + self.signal
        if self.first is not None:
            self.say(report(self.first))
        return self.status()

    def run_all(self, commands: Sequence[RankCommand]) -> None:
        """Run the ranks until all have ended."""
        for index, command in enumerate(commands):
            self._start(index, command)
        while self.alive:
            self.turn()

    def close(self) -> None:
        """Called at the end."""
        if self.signal == signal.SIGINT:
            count = len(self.ranks)
            self.say(f"hf-zero launch: interrupted; {count} rank{'s' * (count != 1)} of {self.host} ended\n")

    def status(self) -> int:
        """The exit status for a shell if no signal has ended the ranks."""
        return 0 if self.first is None else self.first.exit_status

    def stream(self, descriptor: int) -> Stream:
        """What ranks write to a standard stream goes through."""
        return Stream(descriptor)

    def say(self, text: str) -> None:
        """Write to stderr, below a line that a rank has begun."""
        self.streams[2].write(self, text.encode(errors="backslashreplace"))

    def start_process(self, command: RankCommand) -> RankProcess:
        return start(command)

    def _start(self, index: int, command: RankCommand) -> None:
        path = self.log_path(command.rank)
        log = _open_log(path) if path else None
        process = self.start_process(command)
        self._guard.add(process.pid)
        rank = Rank(command, process, log, watch(process.pid))
        self.ranks.append(rank)
        self.alive.add(index)
        for pipe, number in ((process.stdout, 1), (process.stderr, 2)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.selector.register(pipe, selectors.EVENT_READ, partial(self._hear, rank, pipe, self.streams[number]))
        if rank.watch is not None:
            self.selector.register(rank.watch, selectors.EVENT_READ, lambda: self._look_at(index))

    def turn(self) -> None:
        """Handle the events of one tick."""
        events = self.selector.select(self.tick_s)
        for key, _ in events:
            key.data()
        if not events:
            self._flush()
        for index in sorted(self.alive):
            if self.ranks[index].watch is None:
                self._look_at(index)
        if self.kill_at is not None and time.monotonic() > self.kill_at:
            self.send(signal.SIGKILL)
        if self._is_attached and self.kill_at is None and is_deserted(1):
            self.signal = signal.SIGHUP
            self.end(signal.SIGTERM)

    def _look_at(self, index: int) -> None:
        """Check whether a rank has ended; the first one that failed ends the others."""
        rank = self.ranks[index]
        code = rank.process.poll()
        if code is None or index not in self.alive:
            return
        self.alive.discard(index)
        if rank.watch is not None:
            self.selector.unregister(rank.watch)
            os.close(rank.watch)
        if code != 0 and self.kill_at is None:
            self.has_failed(rank, code)

    def has_failed(self, rank: Rank, code: int) -> None:
        """Called when the first rank fails."""
        self.drain(rank)
        self.fail(self.failure_of(rank, code))

    def failure_of(self, rank: Rank, code: int) -> Failure:
        number = rank.command.rank
        return Failure(number, self.host, code, rank.tail.text(), self.log_path(number))

    def fail(self, failure: Failure) -> None:
        """End all ranks because of a failure, unless there has been one."""
        if self.first is None:
            self.first = failure
            self.end(self.ends_others_by)

    def _heed(self, inbox: SignalInbox) -> None:
        for number in inbox.take():
            if self.signal is not None:
                self.send(signal.SIGKILL)  # the second signal forces the end
                continue
            self.signal = number
            self.end(number)

    def end(self, number: int) -> None:
        """Ask the ranks to end with a signal; they are killed if they take too long."""
        self.kill_at = time.monotonic() + self.grace_s
        self.send(number)

    def send(self, number: int) -> None:
        for index in self.alive:
            self.send_to(self.ranks[index].process.pid, number)

    def send_to(self, pid: int, number: int) -> None:
        """Send a signal to a rank and its child processes."""
        signal_group(pid, number)

    def kill_all(self) -> None:
        """Kill all ranks with their child processes, and close their logs."""
        for rank in self.ranks:
            self.send_to(rank.process.pid, signal.SIGKILL)
            rank.process.wait()
            self._guard.remove(rank.process.pid)
            if rank.log is not None:
                rank.log.close()

    def drain(self, only: Rank | None = None) -> None:
        """Read the remaining output in the pipes."""
        deadline = time.monotonic() + _LAST_OUTPUT_S
        ranks = self.ranks if only is None else [only]
        while any(rank.open_pipes for rank in ranks) and time.monotonic() < deadline:
            for key, _ in self.selector.select(self.tick_s):
                if isinstance(key.data, partial):  # of a pipe
                    key.data()
        for rank in ranks:
            self.streams[2].write(id(rank), rank.filter.end())
        self._flush(is_end=only is None)

    def _flush(self, *, is_end: bool = False) -> None:
        for stream in self.streams.values():
            stream.flush(is_end=is_end)

    def _hear(self, rank: Rank, pipe: IO[bytes], stream: Stream) -> None:
        """Read from a pipe in which a rank has written output, or which it has closed."""
        if pipe.closed:
            return  # already drained
        try:
            chunk = os.read(pipe.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            rank.open_pipes -= 1
            self.selector.unregister(pipe)
            pipe.close()
            return
        rank.tail.add(chunk)
        if rank.log is not None:
            rank.log.write(chunk)
        elif self.signal == signal.SIGINT and stream is self.streams[2]:
            stream.write(id(rank), rank.filter.add(chunk))
        else:
            stream.write(id(rank), chunk)


def _open_log(path: str) -> BinaryIO:
    try:
        return open(path, "ab", buffering=0)  # append, because ranks may restart
    except OSError as error:
        raise LaunchError(f"the log {shown(path)} cannot be written: {error}") from None


def run_ranks(
    job: Job,
    host: str,
    commands: Sequence[RankCommand],
    report: Callable[[Failure], str] = Failure.message,
    *,
    is_attached: bool = False,
    supervisor: Callable[..., Supervisor] = Supervisor,
) -> int:
    """Run these ranks; returns the exit status. `supervisor`: which kind runs them."""
    for command in commands:
        name_gloo_interface(command.environment, [name for name in job.world.names if name != host])
    paths = _log_paths(job.log_folder)
    return supervisor(host, log_path=paths, is_attached=is_attached).run(commands, report)


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
        report = partial(Failure.mark, token=job.token)  # for the launcher, which reads our output
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
