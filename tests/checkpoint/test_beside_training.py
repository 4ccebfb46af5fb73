"""Asynchronous checkpoints: their content, and errors when one cannot be written."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from bench.stall import PAGE, section
from hf_zero import initialize
from hf_zero.api.parameter_access import safe_set_full_optimizer_state
from hf_zero.checkpoint import CheckpointError, background, open_checkpoint, service, transaction
from hf_zero.checkpoint.arena import Arena
from hf_zero.checkpoint.files.writer import MemoryPiece, Order, Writer, name_of
from hf_zero.comm import ledger
from tests.checkpoint.training import new_engine, train
from tests.support.launch import ROOT
from tests.support.ranks import forking_context, run_each

BACKGROUND = {"hf_zero": {"checkpoint": {"async": True}}}
BF16 = {"bf16": {"enabled": True}}
copy_now = background.Snapshot.copy


def copy_late(taken: background.Snapshot) -> None:
    """Delays the copy until forward and backward have finished, as on a busy machine."""
    time.sleep(0.3)
    copy_now(taken)


def run_saves(rank: int, stage: int, root: str, sections: dict[str, Any]) -> tuple[list[float], int]:
    """Two saves during training. Returns losses, and the number of exchanges of elements for the files."""
    engine = new_engine(stage, 2, **sections, **BF16)
    small = mock.patch.object(Arena, "SMALL_BYTES", 0)  # the writer process writes all of the shared memory
    with small, mock.patch.object(background.Snapshot, "copy", copy_late):
        train(engine, rank, 2, range(3))
        ledger.reset()
        engine.save_checkpoint(root)
        num_exchanges = sum(t.calls for (phase, name), t in ledger.tallies.items() if "all_to_all" in name)
        train(engine, rank, 2, range(3, 5))
        engine.save_checkpoint(root)
        losses = train(engine, rank, 2, range(5, 8))
        engine.destroy()  # waits for the save
    return losses, num_exchanges


@pytest.mark.parametrize("stage", [2, 3])
def test_a_save_in_the_background_holds_the_state_of_its_moment(stage: int, tmp_path: Path) -> None:
    """Even if the next update starts before masters and states are copied. Ranks of one host do not send each other the
    elements of their files, but read them from shared memory."""
    behind, at_once = str(tmp_path / "a"), str(tmp_path / "b")
    in_background, waiting = run_each(run_saves, 2, [(stage, behind, BACKGROUND), (stage, at_once, {})])
    assert [losses for losses, _ in in_background] == [losses for losses, _ in waiting]
    assert [exchanges for _, exchanges in in_background] == [0, 0]
    assert all(exchanges > 0 for _, exchanges in waiting) == (stage == 2)
    for tag in ("global_step3", "global_step5"):
        first, second = open_checkpoint(behind, tag), open_checkpoint(at_once, tag)
        for name in first.shapes:
            for kind in ("fp32", "exp_avg", "exp_avg_sq"):
                assert torch.equal(first.read(name, kind), second.read(name, kind)), (tag, name, kind)
    assert (tmp_path / "a" / "latest").read_text() == "global_step5"


def test_what_the_program_sets_beside_a_save_comes_after_it(tmp_path: Path, monkeypatch: Any) -> None:
    """API functions wait for the save; direct writes to state tensors are detected, instead of saving a mixed state."""
    monkeypatch.setattr(background.Snapshot, "copy", copy_late)
    engine = new_engine(2, 1, **BACKGROUND, **BF16)
    train(engine, 0, 1, range(2))
    parameter = next(p for p in engine.module.parameters() if p.requires_grad and p.ndim > 1)
    name = next(name for name, p in engine.module.named_parameters() if p is parameter)
    engine.save_checkpoint(str(tmp_path))
    safe_set_full_optimizer_state(parameter, torch.full(parameter.shape, 7.0), "exp_avg")
    train(engine, 0, 1, range(2, 3))
    engine._checkpoints().background.wait()
    assert not (open_checkpoint(tmp_path).read(name, "exp_avg") == 7).any()

    engine.save_checkpoint(str(tmp_path), tag="torn")
    for state in engine.optimizer.state.values():
        state["exp_avg"].zero_()
    with pytest.raises(CheckpointError, match="the program changed optimizer states while they were being saved"):
        engine._checkpoints().background.wait()
    assert not (tmp_path / "torn").exists()
    train(engine, 0, 1, range(3, 4))
    engine.destroy()


def test_without_room_for_a_copy_training_waits(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(service, "host_available", lambda: 1000)
    engine = new_engine(2, 1, **BACKGROUND)
    train(engine, 0, 1, range(1))
    engine.save_checkpoint(str(tmp_path))
    assert open_checkpoint(tmp_path).meta["global_steps"] == 1  # it is already complete
    assert "host memory is too small for a second copy" in caplog.text


def test_memory_is_kept_for_the_next_save_and_given_back_at_the_end(tmp_path: Path) -> None:
    engine = new_engine(2, 1, **BACKGROUND)
    train(engine, 0, 1, range(1))
    sizes = []
    for tag in "abc":
        engine.save_checkpoint(str(tmp_path), tag=tag)
        sizes.append(engine._checkpoints().background.arena.num_bytes)
    saves = engine._checkpoints()
    engine.destroy()
    assert sizes[0] > 0 and len(set(sizes)) == 1 and saves.background.arena.num_bytes == 0


def test_a_failure_in_the_background_surfaces_at_the_next_step(tmp_path: Path, monkeypatch: Any) -> None:
    engine = new_engine(2, 1, **BACKGROUND)
    train(engine, 0, 1, range(1))

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        engine.save_checkpoint(str(tmp_path))
        engine._checkpoints().background._thread.join()  # type: ignore[union-attr]
    micro_steps = engine.micro_steps
    with pytest.raises(CheckpointError, match="global_step1: was not written: rank 0 could not write its files"):
        train(engine, 0, 1, range(1, 2))
    engine.step()  # after catching the error, the program can continue
    assert engine.micro_steps == micro_steps + 1 and engine.global_steps == 2
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    assert open_checkpoint(tmp_path).meta["global_steps"] == 2


_LAST_SAVE_FAILS = """
import os, sys
import torch
import hf_zero
config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}}
config["hf_zero"] = {"checkpoint": {"async": True}}
engine = hf_zero.initialize(model=torch.nn.Linear(2, 2), config=config)[0]
engine.backward(engine(torch.ones(1, 2)).sum())
engine.step()
def full(*_):
    raise OSError(28, "No space left on device")
os.pwrite = full
engine.save_checkpoint(sys.argv[1])
print("the script has come to its end")
"""


def test_a_program_whose_last_save_fails_in_the_background_has_failed(tmp_path: Path) -> None:
    """The disk was full when the last checkpoint was written asynchronously at the end of the script. No later step
    could raise the error, so the script exited with status 0, without a checkpoint or an error message."""
    words = [sys.executable, "-c", _LAST_SAVE_FAILS, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert "the script has come to its end" in done.stdout and done.returncode == 1
    assert "No space left on device" in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def is_terminated(folder: str) -> None:
    """A single-process program that gets a signal while files are being written."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # even if the tests were started with SIGTERM ignored
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **BACKGROUND}
    engine = initialize(model=torch.nn.Linear(2, 2), config={**config, "zero_optimization": {"stage": 1}})[0]
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    write = transaction._write_files

    def slowly(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        return write(*arguments)

    transaction._write_files = slowly
    engine.save_checkpoint(folder)
    while True:
        time.sleep(0.01)


def test_a_save_that_was_begun_is_finished_before_sigterm_ends_the_program(tmp_path: Path) -> None:
    program = forking_context().Process(target=is_terminated, args=(str(tmp_path),), daemon=True)
    program.start()
    program.join(120)
    assert program.exitcode == -signal.SIGTERM
    assert open_checkpoint(tmp_path).meta["global_steps"] == 1


@pytest.fixture
def writer() -> Any:
    process = Writer()
    yield process
    process.close()


@pytest.mark.processes
def test_the_writer_puts_pieces_of_memory_where_they_belong(writer: Writer, tmp_path: Path) -> None:
    memory, file = os.memfd_create("test"), os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    content = os.urandom(9 << 20)  # more than two blocks
    os.pwrite(memory, content, 0)
    pieces = [MemoryPiece(name_of(memory), 64, 8 << 20), MemoryPiece("", 0, 100), MemoryPiece(name_of(memory), 0, 5)]
    expected = content[64 : 64 + (8 << 20)] + bytes(100) + content[:5]
    checksums = writer.write(file, [Order(10, pieces), Order(0, [MemoryPiece(name_of(memory), 7, 2)])])
    assert checksums == [zlib.crc32(expected), zlib.crc32(content[7:9])]
    assert (tmp_path / "file").read_bytes() == content[7:9] + bytes(8) + expected
    os.close(memory)
    os.close(file)


@pytest.mark.processes
def test_what_goes_wrong_in_the_writer_is_an_error_here(writer: Writer, tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(OSError, match="No space left") as caught:
        writer.write(full, [Order(0, [MemoryPiece("", 0, 10)])])
    assert caught.value.errno == errno.ENOSPC
    writer._process.kill()
    with pytest.raises(OSError, match="the process that writes checkpoints has exited with status -9"):
        writer.write(full, [Order(0, [MemoryPiece("", 0, 10)])])
    os.close(full)


def test_the_page_has_what_was_measured() -> None:
    assert section() in PAGE.read_text(encoding="utf-8")
