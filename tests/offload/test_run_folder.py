"""Each run has its own folder, which is removed at its end, or by the next run if it was killed."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from hf_zero.offload.run_folder import RunFolder, at_signal, forget
from hf_zero.offload.vector import StorageError
from tests.support.ranks import forking_context

HOLDER = """
import sys, time
from hf_zero.offload.run_folder import RunFolder, at_signal, forget
folder = RunFolder(sys.argv[1])
(folder.path / "states").write_bytes(bytes(1000))
print(folder.path.name, flush=True)
sys.stdin.read()
"""


def holder(root: Path) -> tuple[subprocess.Popen[str], str]:
    """A process that holds a folder until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_it_is_private_and_goes_when_it_is_closed(tmp_path: Path) -> None:
    first, second = RunFolder(tmp_path), RunFolder(tmp_path)
    assert first.path != second.path and {first.path, second.path} == set(tmp_path.iterdir())
    first.close()
    assert list(tmp_path.iterdir()) == [second.path]
    del second
    assert list(tmp_path.iterdir()) == []


def test_it_goes_when_its_process_ends(tmp_path: Path) -> None:
    process, name = holder(tmp_path)
    assert (tmp_path / name).is_dir()
    process.communicate()
    assert process.returncode == 0 and list(tmp_path.iterdir()) == []


def hold(root: str, pipe: Connection, number: int, *, is_busy: bool) -> None:
    """Holds a folder forever, in a process that signal `number` ends as by default."""
    signal.signal(number, signal.SIG_DFL)  # even if the tests were started with it ignored, as under nohup
    folder = RunFolder(root)
    (folder.path / "states").write_bytes(bytes(1000))
    pipe.send(folder.path.name)
    if is_busy:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
    pipe.recv()


def forked_holder(root: Path, number: int = signal.SIGTERM, *, is_busy: bool = False) -> tuple[Any, Connection, str]:
    """(process, pipe, folder's name): forked from a server with torch imported; runs as long as the pipe is open."""
    context = forking_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(str(root), theirs, number), kwargs={"is_busy": is_busy})
    process.start()
    return process, ours, ours.recv()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("is_busy", [False, True], ids=["waiting", "busy in one call"])
def test_it_goes_when_its_process_is_told_to_end(is_busy: bool, number: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM and SIGHUP left swap folders, as large as the states, until the next run; SIGINT did not.

    The process must still die of the signal at once, even while its main thread is in one endless call.
    """
    process, _pipe, name = forked_holder(tmp_path, number, is_busy=is_busy)
    assert (tmp_path / name).is_dir()
    os.kill(process.pid, number)
    process.join(timeout=60)
    assert process.exitcode == -number
    assert list(tmp_path.iterdir()) == []


def wait_with_tasks(root: str, pipe: Connection) -> None:
    """Waits for a signal, for which one task is still to be done."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    kept, done = (Path(root, name).touch for name in ("kept", "done"))
    at_signal(kept)
    at_signal(done)
    for _ in range(2):
        forget(done)
    pipe.send("")
    pipe.recv()


def test_what_is_to_be_done_at_a_signal_can_be_forgotten(tmp_path: Path) -> None:
    context = forking_context()
    ours, theirs = context.Pipe()
    process = context.Process(target=wait_with_tasks, args=(str(tmp_path), theirs))
    process.start()
    ours.recv()
    process.terminate()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_program_that_handles_the_signal_keeps_it(tmp_path: Path) -> None:
    handles = "import signal\nsignal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))\nfolder = RunFolder"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER.replace("folder = RunFolder", handles), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 7 and list(tmp_path.iterdir()) == []


def test_the_next_run_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    living, killed = forked_holder(tmp_path), forked_holder(tmp_path)
    foreign = tmp_path / "hf_zero_swap.another-machine.1.00000000"
    foreign.mkdir()
    killed[0].kill()
    killed[0].join()
    assert (tmp_path / killed[-1] / "states").exists()
    folder = RunFolder(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {living[-1], foreign.name, folder.path.name}
    living[0].kill()
    living[0].join()
    folder.close()


def test_a_forked_child_leaves_it_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    child = os.fork()
    if not child:
        folder.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert folder.path.is_dir()
    folder.close()


def test_a_drive_that_is_not_mounted_is_not_replaced_by_the_disk_below(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is not an existing folder: mount the drive"):
        RunFolder(tmp_path / "nvme")
    assert not (tmp_path / "nvme").exists()
