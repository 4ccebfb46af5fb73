"""Real file systems that are full, and a real disk with I/O errors: small ones, mounted by the tests (as root)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from hf_zero.offload.memory_estimate import DoesNotFit
from hf_zero.offload.vector import StorageError
from tests.offload.offload_runs import Run, engine_for, train
from tests.offload.test_faults import load_and_go_on
from tests.offload.test_offload import on_drive
from tests.support.ranks import run_each, run_ranks

MB = 1 << 20
IMAGE_BYTES = 16 * MB
Mount = Callable[..., Path]


def command(*words: object) -> str:
    if shutil.which(str(words[0])) is None:
        pytest.skip(f"{words[0]} is not installed")
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot be done on this machine: {' '.join(map(str, words))}: {done.stderr.strip()[:200]}")
    return done.stdout.strip()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """mount(size=...): a tmpfs of that many bytes; mount(image=path): ext4 on a loop device over a new file."""
    if os.geteuid() != 0:
        pytest.skip("mounting takes root")
    folders, devices = [], []

    def mount_at(*, size: int = 0, image: Path | None = None) -> Path:
        folder = tmp_path / f"mount{len(folders)}"
        folder.mkdir()
        if image is None:
            command("mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder)
        else:
            image.write_bytes(b"")
            os.truncate(image, IMAGE_BYTES)
            command("mkfs.ext4", "-q", "-O", "^has_journal", image)
            devices.append(command("losetup", "--show", "-f", image))
            command("mount", devices[-1], folder)
        folders.append(folder)
        return folder

    yield mount_at
    for words in (*(["umount", "-l", folder] for folder in folders), *(["losetup", "-d", name] for name in devices)):
        subprocess.run([str(word) for word in words], check=False)


def start(rank: int, run: Run) -> str:
    try:
        engine_for(run, 2)
    except DoesNotFit as error:
        return str(error)
    return "started"


def test_a_drive_that_is_too_small_is_refused_with_both_numbers(mount: Mount) -> None:
    run = Run(2, zero=on_drive(mount(size=4096), parameters=False))
    for message in run_ranks(start, 2, run):
        assert "2 rank(s) need 8.68 kB of disk" in message and "free some space" in message


def take_all(path: Path) -> None:
    with open(path, "wb") as file:
        for size in (MB, 4096):
            with suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)


def fill_up(rank: int, run: Run, folder: str, saved: str) -> str:
    """RMSprop's states are unknown in advance, so their space is reserved in the first step, when none is left."""
    engine = engine_for(run, 2)
    engine.save_checkpoint(saved)
    torch.distributed.barrier()
    if rank == 0:
        take_all(Path(folder) / "of somebody else")
    torch.distributed.barrier()
    try:
        train(engine, run, rank, 2, steps=2)
    except StorageError as error:
        return str(error)
    return "trained on"


@pytest.mark.parametrize("kind", [pytest.param("tmpfs", marks=pytest.mark.slow), "ext4"])
def test_a_drive_that_somebody_else_fills_stops_all_ranks(kind: str, mount: Mount, tmp_path: Path) -> None:
    folder = mount(size=4 * MB) if kind == "tmpfs" else mount(image=tmp_path / "image")
    optimizer = (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5})
    run = Run(2, zero=on_drive(folder, parameters=False), optimizer=optimizer)
    saved = tmp_path / "saved"
    for message in run_ranks(fill_up, 2, run, str(folder), str(saved)):
        assert "bytes more, and the drive has" in message and "No space left" in message and str(folder) in message
    (folder / "of somebody else").unlink()
    assert not list(folder.glob("hf_zero_swap*"))
    runs = [(run, str(saved)), (Run(2, optimizer=optimizer), str(saved))]
    [ours, _], [expected, _] = run_each(load_and_go_on, 2, runs)
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


def lose_the_disk(rank: int, run: Run, image: str, saved: str) -> str:
    engine = engine_for(run, 2)
    train(engine, run, rank, 2, steps=1)
    engine.optimizer.updater.stager.flush()
    engine.save_checkpoint(saved)
    torch.distributed.barrier()
    if rank == 0:
        os.truncate(image, MB // 4)  # reading beyond this fails: the kernel returns EIO
    torch.distributed.barrier()
    try:
        train(engine, run, rank, 2, first=1, steps=3)
    except StorageError as error:
        return str(error)
    return "trained on"


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_disk_that_gives_errors_stops_all_ranks_and_training_resumes_elsewhere(
    stage: int, mount: Mount, tmp_path: Path
) -> None:
    folder, saved = mount(image=tmp_path / "image"), tmp_path / "saved"
    run = Run(stage, zero=on_drive(folder, parameters=stage == 3))
    for message in run_ranks(lose_the_disk, 2, run, str(tmp_path / "image"), str(saved)):
        assert "could not read" in message and "Input/output error" in message and str(folder) in message
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = Run(stage, zero=on_drive(elsewhere, parameters=stage == 3))
    [ours, _], [expected, _] = run_each(load_and_go_on, 2, [(moved, str(saved)), (Run(stage), str(saved))])
    assert all(torch.equal(ours[name], value) for name, value in expected.items())
