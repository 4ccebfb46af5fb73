"""Ranks killed, disks full and folders read-only at random points of a save: training resumes from what is left.

Each attempt loads the checkpoint that `latest` names, takes a step whose loss must match the undisturbed run, and is
interrupted while it saves. The points are chosen among the calls that change the disk; the seed is printed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.api.engine import ZeroEngine
from hf_zero.checkpoint import CheckpointError, open_checkpoint
from hf_zero.checkpoint.transaction import check_folder
from tests.checkpoint.disk_calls import DiskCalls
from tests.checkpoint.training import new_engine, train
from tests.support.ranks import RankFailure, run_ranks

SEED = 20260
WORLD = 2
LAST = 12  # steps of the undisturbed run; a campaign that gets there starts over
BACKGROUND = {"hf_zero": {"checkpoint": {"async": True}}}


@dataclass(frozen=True)
class Attack:
    """When and how the save of one attempt ends.

    Attributes:
        rank, call: before which disk change of this rank (0: never).
        everybody: whether all ranks die with it.
        background: whether the save is asynchronous.
    """

    rank: int
    call: int
    everybody: bool = False
    background: bool = False


def engine_at(stage: int, root: str, **sections: Any) -> ZeroEngine:
    """An engine resumed from `latest`, or a new one if nothing has been saved."""
    engine = new_engine(stage, WORLD, **sections)
    if (Path(root) / "latest").exists():
        engine.load_checkpoint(root)
    return engine


def run_undisturbed(rank: int, stage: int, root: str) -> tuple[list[float], int]:
    """The losses of all steps, and the number of this rank's disk changes in a second save."""
    engine = new_engine(stage, WORLD)
    losses = train(engine, rank, WORLD, range(1))
    engine.save_checkpoint(root)
    losses += train(engine, rank, WORLD, range(1, LAST))
    with DiskCalls(0, lambda: None) as calls:
        engine.save_checkpoint(root)
    return losses, calls.count


def run_attacked(rank: int, stage: int, root: str, attack: Attack) -> list[tuple[int, float]]:
    """One step, a save that some ranks may not survive, and another step; (number, loss) of each."""
    engine = engine_at(stage, root, **(BACKGROUND if attack.background else {}))
    pids: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(pids, os.getpid())

    def kill() -> None:
        for peer in range(WORLD):
            if peer != rank and attack.everybody:
                os.kill(pids[peer], signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    first = engine.global_steps
    found = list(zip(range(first, first + 1), train(engine, rank, WORLD, range(first, first + 1)), strict=True))
    with DiskCalls(attack.call if rank == attack.rank else 0, kill):
        engine.save_checkpoint(root)
        found += zip(range(first + 1, first + 2), train(engine, rank, WORLD, range(first + 1, first + 2)), strict=True)
        engine.destroy()  # waits for an asynchronous save
    return found


def run_step(rank: int, stage: int, root: str, tag: str) -> tuple[int, float]:
    """Number and loss of the step that follows a checkpoint."""
    engine = new_engine(stage, WORLD, seed=8)
    engine.load_checkpoint(root, tag)
    step = engine.global_steps
    return step, train(engine, rank, WORLD, range(step, step + 1))[0]


def whole_checkpoints(root: Path) -> set[str]:
    """Tags under their final names, each verified to be complete."""
    tags = {path.name for path in root.glob("global_step*")}
    for tag in tags:
        check_folder(open_checkpoint(root, tag).folder.path)
    latest = root / "latest"
    assert not latest.exists() or latest.read_text() in tags
    return tags


class Campaign:
    """One folder of checkpoints under attack."""

    def __init__(self, root: Path, stage: int) -> None:
        self.root, self.stage = root, stage
        found = run_ranks(run_undisturbed, WORLD, stage, str(root / "undisturbed"))
        self.losses: list[float] = found[0][0]
        self.changes = [count for _, count in found]
        self.attempts = self.deaths = 0
        self._begin()

    def _begin(self) -> None:
        self.folder = self.root / "attacked"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.known: set[str] = set()

    def attempt(self, attack: Attack) -> None:
        """Attacks once; earlier checkpoints must remain, and all checkpoints must be valid."""
        self.attempts += 1
        try:
            for found in run_ranks(run_attacked, WORLD, self.stage, str(self.folder), attack):
                assert all(loss == self.losses[step] for step, loss in found)
        except RankFailure as failure:
            assert failure.kind not in ("AssertionError", "Timeout"), failure
            self.deaths += 1
        found = whole_checkpoints(self.folder)
        assert self.known <= found, f"lost {self.known - found} to {attack}"
        self.known = found
        if f"global_step{LAST - 2}" in found:
            self.resume_everything()
            self._begin()

    def resume_everything(self) -> None:
        """Every existing checkpoint resumes like the undisturbed run."""
        for tag in self.known:
            step, loss = run_ranks(run_step, WORLD, self.stage, str(self.folder), tag)[0]
            assert loss == self.losses[step], tag

    def draw(self, dice: random.Random, **kind: bool) -> Attack:
        """A random rank and point of a save."""
        rank = dice.randrange(WORLD)
        return Attack(rank, dice.randint(1, self.changes[rank]), **kind)


def test_kills_of_one_rank_and_of_all(tmp_path: Path) -> None:
    """A short form of the campaign below, at chosen points: the first write, the last rename, an asynchronous save."""
    campaign = Campaign(tmp_path, 2)
    campaign.attempt(Attack(0, 0))
    campaign.attempt(Attack(1, 3))
    campaign.attempt(Attack(0, campaign.changes[0] - 2, everybody=True))
    campaign.attempt(Attack(0, 4, background=True))
    campaign.resume_everything()
    assert campaign.deaths == 3 and campaign.known >= {"global_step1"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("stage", "everybody"), [(1, False), (2, True), (3, False), (3, True)])
def test_campaign_of_kills(stage: int, everybody: bool, tmp_path: Path) -> None:
    """Twenty kills each; a third of the saves is asynchronous."""
    print(f"seed {SEED + stage}")
    dice, campaign = random.Random(SEED + stage), Campaign(tmp_path, stage)
    while campaign.deaths < 20:
        campaign.attempt(campaign.draw(dice, everybody=everybody, background=dice.random() < 1 / 3))
        assert campaign.attempts < 60, "most attacks must hit"
    campaign.resume_everything()


class SmallDisk:
    """A file system in memory whose size and writability can be changed while it is mounted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self) -> str:
        """Returns the reason if it cannot be mounted, else an empty string."""
        self.path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=64m", "hf_zero_test", str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stderr.strip() if done.returncode else ""

    def set(self, options: str) -> bool:
        """Remounts with other options; returns False if open files prevent it."""
        command = ["mount", "-o", f"remount,{options}", str(self.path)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk")
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    problem = disk.mount()
    if problem:
        pytest.skip(f"a small file system cannot be mounted here: {problem}")
    try:
        yield disk
    finally:
        disk.unmount()


def run_on_small_disk(rank: int, stage: int, path: str, seed: int, attempts: int) -> tuple[int, list[float]]:
    """Saves on a disk that is too small or turns read-only at random points; returns the failures and losses."""
    disk, dice, root = SmallDisk(Path(path)), random.Random(seed), f"{path}/checkpoints"
    engine = new_engine(stage, WORLD)
    losses = train(engine, rank, WORLD, range(1))
    engine.save_checkpoint(root)
    needed = sum(file.stat().st_size for file in Path(root).rglob("*"))
    failures = 0
    for number in range(1, attempts + 1):
        losses += train(engine, rank, WORLD, range(number, number + 1))
        room, call = dice.randrange(needed), dice.randint(1, 12)
        if number % 2 and rank == 0:
            used = sum(file.stat().st_blocks * 512 for file in Path(path).rglob("*"))
            assert disk.set(f"size={used + room}")
        torch.distributed.barrier()
        lock = call if number % 2 == 0 and rank == 0 else 0
        with DiskCalls(lock, lambda: disk.set("ro")):
            try:
                engine.save_checkpoint(root)
            except CheckpointError as error:
                failures += 1
                assert "was not written: rank" in str(error) and "earlier checkpoints are unchanged" in str(error)
        torch.distributed.barrier()
        if rank == 0:
            assert disk.set("rw,size=64m")
            assert f"global_step{whole_steps(Path(root))}" == (Path(root) / "latest").read_text()
        torch.distributed.barrier()
    return failures, losses


def whole_steps(root: Path) -> int:
    """The number of steps of the newest checkpoint."""
    return max(int(tag.removeprefix("global_step")) for tag in whole_checkpoints(root))


def on_small_disk(disk: SmallDisk, stage: int, seed: int, attempts: int) -> None:
    print(f"seed {seed}")
    found = run_ranks(run_on_small_disk, WORLD, stage, str(disk.path), seed, attempts)
    assert found[0] == found[1] and found[0][0] >= attempts // 2, "every rank hears of every failure"
    losses, folder = found[0][1], disk.path / "checkpoints"
    newest = whole_steps(folder)
    step, loss = run_ranks(run_step, WORLD, stage, str(folder), f"global_step{newest}")[0]
    assert step == newest and (step == len(losses) or loss == losses[step])


def test_a_full_disk_and_a_read_only_one(small_disk: SmallDisk) -> None:
    on_small_disk(small_disk, 2, seed=1, attempts=2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_campaign_of_full_and_read_only_disks(stage: int, small_disk: SmallDisk) -> None:
    on_small_disk(small_disk, stage, SEED + stage, attempts=16)
