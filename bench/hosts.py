"""Simulated hosts (network namespaces joined by a bridge), and jobs whose ranks run on them. Needs root.

    with joined_hosts(4, "1gbit", "0ms") as (spaces, _), Job(words, spaces) as ours, Job(others, spaces) as theirs:
        for _ in range(rounds):
            found = ours.play_round() | theirs.play_round()         # the other job's ranks sleep meanwhile

A rank calls `play_rounds` for its side of a round; `main` is the command line shared by both sides.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import secrets
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from bench.models import SIZES
from bench.surroundings import ROOT, keep, machine, public, rank_environments

Round = dict[str, Any]  # results of one round, by way
_TOLD = "BENCH_TOLD"  # environment variable with the file descriptor on which rank 0 reports


@contextlib.contextmanager
def joined_hosts(number: int, rate: str, delay: str) -> Iterator[tuple[list[str], bool]]:
    """Names of namespaces, each joined to a bridge by its own link, and whether links are delayed.

    `tc` limits the rate of a link in each direction; if the kernel has netem, it also delays what hosts send.
    """
    token = secrets.token_hex(3)
    bridge, spaces = f"hfz-{token}-bridge", [f"hfz-{token}-{host}" for host in range(number)]

    def run(*words: str, check: bool = True) -> int:
        return subprocess.run(words, check=check, stderr=None if check else subprocess.DEVNULL).returncode

    def limit(space: str, link: str) -> bool:
        tc = ["tc", "-n", space, "qdisc", "add", "dev", link, "root"]
        is_delayed = link == "eth0" and not run(*tc, "netem", "delay", delay, "rate", rate, check=False)
        if not is_delayed:
            run(*tc, "tbf", "rate", rate, "burst", "256kb", "latency", "200ms")
        return is_delayed

    try:
        for space in (bridge, *spaces):
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        run("ip", "-n", bridge, "link", "add", "joint", "type", "bridge")
        run("ip", "-n", bridge, "link", "set", "joint", "up")
        delayed = []
        for host, space in enumerate(spaces):
            port = f"port{host}"
            end = ["link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", bridge]
            run("ip", *end)
            run("ip", "-n", bridge, "link", "set", port, "master", "joint", "up")
            run("ip", "-n", space, "address", "add", f"{_address(host)}/24", "dev", "eth0")
            run("ip", "-n", space, "link", "set", "eth0", "up")
            limit(bridge, port)
            delayed.append(limit(space, "eth0"))
        yield spaces, all(delayed)
    finally:
        for space in (*spaces, bridge):
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def _address(host: int) -> str:
    return f"10.77.9.{host + 1}"


class Job:
    """Ranks that run one round at a time on request, and sleep between rounds."""

    def __init__(
        self, words: list[str], spaces: list[str], *, per_host: int = 1, port: int = 29611, timeout_s: float = 600
    ) -> None:
        """`words`: the command of every rank, which calls `play_rounds`."""
        self._timeout_s = timeout_s
        self._reader, writer = os.pipe()
        self._told = b""
        self._ranks = []
        environments = rank_environments(per_host * len(spaces), deepspeed_python=words[0])
        for rank, environment in enumerate(environments):
            host, local = divmod(rank, per_host)
            own = {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": per_host, "MASTER_ADDR": _address(0), "MASTER_PORT": port}
            own |= {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONWARNINGS": "ignore", _TOLD: writer}
            script = f"hostname host-{host} && exec {' '.join(words)}"
            command = ["ip", "netns", "exec", spaces[host], "unshare", "--uts", "sh", "-c", script]
            environment |= {key: str(value) for key, value in own.items()}
            self._ranks.append(
                subprocess.Popen(command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, pass_fds=(writer,))
            )
        os.close(writer)

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.communicate()
        os.close(self._reader)

    def play_round(self) -> Round:
        """Runs a round; returns rank 0's result."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(b"round\n")
            rank.stdin.flush()
        while b"\n" not in self._told:
            is_ready, _, _ = select.select([self._reader], [], [], self._timeout_s)
            more = os.read(self._reader, 1 << 16) if is_ready else b""
            if not more:
                raise SystemExit(f"ranks have ended with {[rank.poll() for rank in self._ranks]}, or take too long")
            self._told += more
        line, _, self._told = self._told.partition(b"\n")
        found: Round = json.loads(line)
        return found


def play_rounds(play: Callable[[], Round]) -> None:
    """A rank's side of a `Job`: runs a round whenever it is asked to."""
    for _ in sys.stdin:
        found = play()
        if os.environ["RANK"] == "0":
            os.write(int(os.environ[_TOLD]), json.dumps(found).encode() + b"\n")


def main(
    parser: argparse.ArgumentParser,
    play: Callable[[argparse.Namespace], None],
    run_all: Callable[[argparse.Namespace], dict[str, Any]],
    markdown: Callable[[dict[str, Any]], str],
    prefix: str,
) -> None:
    """Measure and store the results, or run as a rank (`play`). Names of result files begin with `prefix`."""
    parser.add_argument("--timeout", type=float, default=900, help="seconds per round")
    parser.add_argument("--name", help="part of the result files' names")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # the job of this rank
    options = parser.parse_args()
    if options.job:
        play(options)
        return
    run = {"date": datetime.datetime.now().isoformat(timespec="minutes"), "command": sys.argv[1:]}
    run |= {"size": options.size, **run_all(options), "versions": {"torch": torch.__version__}, "machine": machine()}
    text = markdown(run)
    sys.stdout.write(text)
    if options.name:
        keep(run, text, f"{prefix}-{options.name}")


def how(run: dict[str, Any], module: str) -> str:
    """Command, date and machine, for the head of a table."""
    machine, words = run["machine"], " ".join(["python", "-m", module, *public(run["command"])])
    place = f"torch {run['versions']['torch']}, {machine['cores']} cores, load {machine['load_1min']} at the end"
    return f"`{words}`, {run['date']}, {place}"


def size_option(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--size", default=default, choices=SIZES, help="model size from bench/models.py")
