"""`hf-zero launch --max_restarts`: when a rank fails, here or on another host, the ranks of all hosts restart."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import psutil

from hf_zero.extras.resilience.peers import PeerLaunchers
from hf_zero.extras.resilience.restarts import TOKEN, Restarts, with_variables
from hf_zero.launch import LaunchError
from hf_zero.launch.children import Failure, signal_group
from hf_zero.launch.job import Job, RankCommand
from hf_zero.launch.ranks import Rank, RankProcess, Supervisor, run_ranks
from hf_zero.launch.relay import BackendOptions


class RestartingSupervisor(Supervisor):
    """Runs the ranks of one node from start to end, and restarts all of them when one fails."""

    tick_s = 0.05  # stopped ranks are found by polling
    ends_others_by = signal.SIGKILL  # ranks continue from states kept in memory, so that they need no time to shut down

    def __init__(
        self, host: str, *, restarts: Restarts, peers: PeerLaunchers | None, stopped_s: float, **options: Any
    ) -> None:
        """
        Args:
            peers: the other hosts, whose ranks restart together with these.
            stopped_s: seconds after which a stopped rank counts as dead.
            options: those of `Supervisor`.
        """
        super().__init__(host, **options)
        self._restarts, self._peers, self._stopped_s = restarts, peers, stopped_s
        self._stopped_at: dict[int, float] = {}  # by pid: when a rank was first seen stopped
        self._is_over = False  # all hosts have finished
        if self._peers is not None:
            self.selector.register(self._peers.descriptor, selectors.EVENT_READ, self._heed_peers)

    def run_all(self, commands: Sequence[RankCommand]) -> None:
        while True:
            if self._peers is not None:
                added = self._peers.await_start(self._wait)
                commands = with_variables(commands, added) if added else []
            super().run_all(commands)
            self._tell_peers()
            if self.first is None or self.signal is not None:
                return
            for rank in self.ranks:  # their children would keep the pipes open
                signal_group(rank.process.pid, signal.SIGKILL)
            self.drain()
            problem = "another host has given up" if self._is_over else self._restarts.refusal(self.first)
            if problem:
                self.say(f"hf-zero launch: {problem}\n")
                if self._peers is not None:
                    self._peers.say("stop", self.first)
                return
            self.say(f"{self.first.summary()}: restarting all ranks{self._restarts.described()}\n")
            self.kill_all()
            self.ranks, self.first, self.kill_at = [], None, None
            commands = self._restarts.renewed(commands)

    def start_process(self, command: RankCommand) -> RankProcess:
        return self._restarts.start(command)

    def turn(self) -> None:
        super().turn()
        self._end_stopped()
        if self.kill_at is None:
            self._restarts.stand_by([rank.command for rank in self.ranks])

    def has_failed(self, rank: Rank, code: int) -> None:
        if code > 0:
            super().has_failed(rank, code)
        else:  # a killed rank has no last words to wait for
            self.fail(self.failure_of(rank, code))

    def close(self) -> None:
        self._restarts.close()
        if self._peers is not None:
            self._peers.close()
        super().close()

    def _end_stopped(self) -> None:
        """Kill ranks that have been stopped (SIGSTOP) for too long, because the others wait for them."""
        for rank in (self.ranks[index] for index in self.alive):
            pid, now = rank.process.pid, time.monotonic()
            if not _is_stopped(pid):
                self._stopped_at.pop(pid, None)
            elif now - self._stopped_at.setdefault(pid, now) > self._stopped_s:
                self.say(f"hf-zero launch: rank {rank.command.rank} has been stopped for {self._stopped_s:g} s\n")
                signal_group(pid, signal.SIGKILL)

    def _wait(self) -> bool:
        """Handle events for one tick while no ranks run. Returns False after a signal."""
        for key, _ in self.selector.select(self.tick_s):
            if self._peers is None or key.fd != self._peers.descriptor:
                key.data()
        return self.signal is None

    def _tell_peers(self) -> None:
        """Tell the other hosts how this host's ranks ended; after success, wait until all hosts have finished."""
        if self._peers is None:
            return
        if self.first is not None and self.first.host == self.host:
            self._peers.say("end", self.first)
        elif self.first is None and self.signal is None:
            self._peers.say("done")
            while self.first is None and not self._is_over and self._wait():
                self._heed_peers()

    def _heed_peers(self) -> None:
        assert self._peers is not None
        for message in self._peers.take():
            if message["say"] in ("end", "stop"):
                self.fail(Failure(**message["failure"]))
            elif message["say"] == "lost":
                self.fail(Failure.of_host("the first host"))
            self._is_over |= message["say"] in ("over", "stop")


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped (by SIGSTOP or a debugger)."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def run_with_restarts(job: Job, node_rank: int | None, request: BackendOptions) -> int:
    """Run the ranks of a host; returns the exit status. `node_rank`: None for a spare.

    Raises:
        LaunchError: if there are several hosts and no shared token.
    """
    names, peers = job.world.names, None
    if len(names) > 1:
        token = os.environ.get(TOKEN, "")
        if not token:
            raise LaunchError(
                f"--max_restarts on several hosts needs {TOKEN}, a random secret that is the same on all of them: "
                "for example the output of `openssl rand -hex 16`"
            )
        peers = PeerLaunchers(names, node_rank, job.master_addr, job.master_port, token)
    restarts = Restarts(request.max_restarts, stands_by=request.stands_by)
    if node_rank is None:
        restarts.prepare(job.on_node(0)[0])
        node_rank = None if peers is None else peers.await_place()
    if node_rank is None:  # the job ended without needing this spare
        restarts.close()
        return 0
    supervisor = partial(RestartingSupervisor, restarts=restarts, peers=peers, stopped_s=request.stopped_s)
    return run_ranks(job, names[node_rank], job.on_node(node_rank), supervisor=supervisor)
