"""Trainer on two simulated hosts (network namespaces): ranks and whole hosts are killed, and losses stay the same."""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.hosts import joined_hosts
from bench.surroundings import ROOT
from hf_zero.extras.resilience.restarts import TOKEN, folder_in_memory
from tests.extras.resilience.test_memory import flip
from tests.extras.resilience.undisturbed import undisturbed_lines

_UPDATE_S = 120.0
SPARE = 2  # the namespace of a spare host
_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _has_namespaces() -> bool:
    lacks_program = any(shutil.which(name) is None for name in ("ip", "tc", "unshare"))
    return not lacks_program and os.geteuid() == 0 and not subprocess.run(["unshare", "--net", "true"]).returncode


pytestmark = pytest.mark.skipif(not _has_namespaces(), reason="needs root, and the right to make network namespaces")


def config_at(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "hf_zero": {"resilience": {"enabled": True}},
    }


class TwoHosts:
    """A training on both hosts, which is killed at the end of a `with` block."""

    def __init__(
        self, spaces: list[str], folder: Path, stage: int, per_host: int, updates: int, pause_s: float = 0.3
    ) -> None:
        self.spaces, self.lines_path, self._folder = spaces, folder / "lines", folder
        folder.mkdir()
        (folder / "ds.json").write_text(json.dumps(config_at(stage)))
        (folder / "hosts").write_text("".join(f"10.77.9.{host + 1} slots={per_host}\n" for host in range(2)))
        self.port, self.token = random.SystemRandom().randrange(10000, 32000), secrets.token_hex(16)
        self._updates, self._pause_s = updates, pause_s
        self.launchers = [self.start(host) for host in range(2)]

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(self, *_: object) -> None:
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()

    def start(self, host: int) -> subprocess.Popen[bytes]:
        script = [
            str(self.lines_path),
            str(self._folder / "ds.json"),
            str(self._updates),
            "--pause",
            str(self._pause_s),
        ]
        place = ["--spare"] if host == SPARE else ["--node_rank", str(host)]
        words = [sys.executable, "-m", "hf_zero", "launch", "--no_ssh", *place, "--no_local_rank"]
        words += ["--hostfile", str(self._folder / "hosts"), "--master_port", str(self.port), "--max_restarts", "20"]
        words += ["--module", "bench.chaos_script", *script]
        named = f"hostname host-{host} && exec {' '.join(words)}"
        environment = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
        environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_ZERO": "1", TOKEN: self.token}
        environment["GLOO_SOCKET_IFNAME"] = "eth0"
        with (self._folder / f"said-{host}").open("ab") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.spaces[host], "unshare", "--uts", "sh", "-c", named],
                cwd=ROOT,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def lines(self) -> list[dict[str, Any]]:
        return (
            [json.loads(line) for line in self.lines_path.read_text().splitlines()] if self.lines_path.exists() else []
        )

    def await_update(self, least: int) -> float:
        """Waits for an update after which there are at least `least` lines; returns its time."""
        deadline = time.monotonic() + _UPDATE_S
        while len(self.lines()) < least:
            assert time.monotonic() < deadline and any(each.poll() is None for each in self.launchers), self.said()
            time.sleep(0.01)
        return float(self.lines()[least - 1]["at"])

    def await_copy(self, host: int) -> None:
        """Waits until the other host has a copy of this host's checkpoint: the first copy takes a moment."""
        memory, deadline = folder_in_memory(self.launchers[1 - host].pid), time.monotonic() + _UPDATE_S
        while not any(memory.glob(f"of-{host}/training-1/*/rank-*.json")):
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)

    def ranks(self, host: int) -> list[psutil.Process]:
        return [rank for each in psutil.Process(self.launchers[host].pid).children() for rank in each.children()]

    def kill_rank(self, host: int) -> float:
        """Returns the seconds to the next update."""
        return self._struck([self.ranks(host)[-1].pid])

    def kill_host(self, host: int) -> float:
        """Kills all in the namespace and restarts its launcher. Returns the seconds from then to the next update."""
        listed = subprocess.run(["ip", "netns", "pids", self.spaces[host]], capture_output=True, text=True, check=True)
        return self._struck(list(map(int, listed.stdout.split())), replaced=host)

    def stand_by(self) -> subprocess.Popen[bytes]:
        """Starts a spare that has imported everything and waits."""
        spare, used, deadline = self.start(SPARE), -1.0, time.monotonic() + _UPDATE_S
        while time.monotonic() < deadline:
            time.sleep(1.0)
            forks = psutil.Process(spare.pid).children()
            now = sum(sum(process.cpu_times()[:2]) for process in forks)
            if forks and now > 1 and now == used:
                return spare
            used = now
        raise AssertionError(self.said())

    def lose_host(self, host: int, spare: subprocess.Popen[bytes]) -> float:
        """Like `kill_host`, without restarting its launcher."""
        lost, self.launchers[host] = self.launchers[host], spare
        listed = subprocess.run(["ip", "netns", "pids", self.spaces[host]], capture_output=True, text=True, check=True)
        seconds = self._struck(list(map(int, listed.stdout.split())))
        lost.wait()
        shutil.rmtree(folder_in_memory(lost.pid))
        return seconds

    def _struck(self, pids: list[int], replaced: int | None = None) -> float:
        struck = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.3)
        known = len(self.lines())
        if replaced is not None:
            self.launchers[replaced].wait()
            shutil.rmtree(folder_in_memory(self.launchers[replaced].pid))  # the process that removes it was killed, too
            self.launchers[replaced] = self.start(replaced)
        return self.await_update(known + 1) - struck

    def said_by(self, host: int) -> str:
        return (self._folder / f"said-{host}").read_text(errors="replace")

    def said(self) -> str:
        return "\n".join(self.said_by(host)[-6000:] for host in range(2))

    def await_end(self) -> None:
        """Waits until both launchers have ended by themselves."""
        assert [launcher.wait(timeout=_UPDATE_S) for launcher in self.launchers] == [0, 0], self.said()

    def check(self, right: dict[int, Any]) -> None:
        """No update is missing, or has another loss or norm than without a fault."""
        self.await_end()
        made = self.lines()
        wrong = [line for line in made if (line["loss"], line["norm"]) != right[line["update"]]]
        assert wrong == [] and right.keys() == {line["update"] for line in made}, self.said()


@pytest.fixture(scope="module")
def spaces() -> Iterator[list[str]]:
    with joined_hosts(3, "10gbit", "0ms") as (names, _):
        yield names


def undisturbed(spaces: list[str], folder: Path, stage: int, per_host: int, updates: int) -> dict[int, Any]:
    with TwoHosts(spaces, folder, stage, per_host, updates, pause_s=0.0) as training:
        training.await_end()
    return {line["update"]: (line["loss"], line["norm"]) for line in training.lines()}


Attacks = list[tuple[Callable[[int], float], int]]  # what is done to which host


def attacked(training: TwoHosts, attacks: Attacks, right: dict[int, Any]) -> None:
    """One after the other, each after four updates whose checkpoints have been copied; nothing is lost."""
    recovered = []
    with training:
        for attack, host in attacks:
            training.await_update(len(training.lines()) + 4)
            training.await_copy(host)
            recovered.append(attack(host))
        training.check(right)
    sys.stdout.write(f"seconds to recover: {recovered}\n")
    whole = training.said_by(0)
    assert whole.count("training continues after update") == len(attacks), whole[-6000:]


@pytest.mark.slow  # test_memory.py copies between hosts by default, and test_survival.py kills ranks of one
@pytest.mark.timeout(600)
def test_the_host_that_leads_is_killed(spaces: list[str], tmp_path: Path) -> None:
    """The other host has lost nothing but the rendezvous, and sends the new one its checkpoint."""
    lines = undisturbed_lines(tmp_path / "undisturbed", config_at(2), 8)  # sums of two are the same on one host
    right = {line["update"]: (line["loss"], line["norm"]) for line in lines}
    training = TwoHosts(spaces, tmp_path / "attacked", 2, 1, 8)
    attacked(training, [(training.kill_host, 0)], right)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("stage", "per_host"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_ranks_and_hosts_are_killed(spaces: list[str], stage: int, per_host: int, tmp_path: Path) -> None:
    """A rank of either host, then all of the second host, then all of the first, which leads."""
    right = undisturbed(spaces, tmp_path / "undisturbed", stage, per_host, 32)
    training = TwoHosts(spaces, tmp_path / "attacked", stage, per_host, 32)
    rank, all_of_it = training.kill_rank, training.kill_host
    attacked(training, [(rank, 1), (all_of_it, 1), (rank, 0), (all_of_it, 0)], right)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_spare_takes_the_place_of_a_lost_host(spaces: list[str], tmp_path: Path) -> None:
    """From the copy on the next host; the spare has imported everything before."""
    right = undisturbed(spaces, tmp_path / "undisturbed", 2, 1, 16)
    with TwoHosts(spaces, tmp_path / "attacked", 2, 1, 16) as training:
        spare = training.stand_by()
        training.await_copy(1)
        training.await_update(len(training.lines()) + 2)
        sys.stdout.write(f"seconds to recover: {training.lose_host(1, spare)}\n")
        training.check(right)
    whole = training.said_by(0)
    assert whole.count("training continues after update") == 1, whole[-6000:]


def slots_of(training: TwoHosts, host: int) -> dict[int, Path]:
    """By update: complete and copied checkpoints of a host."""
    found = {}
    for slot in folder_in_memory(training.launchers[host].pid).glob("training-1/[01]"):
        with suppress(OSError, ValueError):
            kept, copied = (json.loads((slot / name).read_text())["step"] for name in (f"rank-{host}.json", "copied"))
            if kept == copied:
                found[kept] = slot
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_values_that_changed_by_themselves_come_back_from_the_next_host(spaces: list[str], tmp_path: Path) -> None:
    """A bit of host 1's last checkpoint flips while all ranks are stopped, then a rank is killed: nothing is lost."""
    right = undisturbed(spaces, tmp_path / "undisturbed", 2, 1, 40)
    with TwoHosts(spaces, tmp_path / "attacked", 2, 1, 40) as training:
        training.await_update(4)
        while True:
            ranks = [rank for host in range(2) for rank in training.ranks(host)]
            for rank in ranks:
                rank.suspend()
            steps = [max(slots_of(training, host), default=None) for host in range(2)]
            made = training.lines()[-1]["update"]
            if steps == [made, made]:
                break
            assert made < 40, "training ended before all ranks could be stopped with the same checkpoint"
            for rank in ranks:
                rank.resume()
            time.sleep(0.02)
        flip(slots_of(training, 1)[made] / "rank-1.0")
        training.kill_rank(0)
        training.check(right)
    said = training.said_by(1)
    found = f"rank-1.0 is not what rank 1 kept after update {made}, so the next host's copy is used"
    assert found in said, said[-6000:]
    assert f"training continues after update {made}, " in training.said_by(0)
