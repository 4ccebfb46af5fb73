"""Independent processes that write to the same place: the last one to finish wins, completely."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_zero.checkpoint import consolidate, open_checkpoint, transaction
from hf_zero.checkpoint.deepspeed.universal import convert_to_universal
from hf_zero.checkpoint.transaction import check_folder
from hf_zero.extras.data_efficiency.analyzer import IndexedRows, write_rows
from hf_zero.staging import StagingFolder
from tests.checkpoint.writer import Setting, example, write

FORK = multiprocessing.get_context("fork")


def both(*acts: Callable[[], object]) -> None:
    """Runs them concurrently, in one process each."""
    running = [FORK.Process(target=act, daemon=True) for act in acts]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0] * len(acts)


def staged(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*") if ".partial" in path.name]


def meet_before(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """Makes both processes wait at this function, where they have written everything but not renamed it."""
    barrier, original = FORK.Barrier(2, timeout=30), getattr(module, name)

    def after_both(*args: Any) -> Any:
        barrier.wait()
        return original(*args)

    monkeypatch.setattr(module, name, after_both)


@pytest.mark.parametrize("exists", [False, True])
def test_two_conversions_into_one_folder(exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script started by a launcher on two ranks ended with convert_zero_checkpoint_to_fp32_state_dict. Both ranks
    wrote to `.weights.partial`, which each removed first: one rank's files disappeared while it wrote them, and the
    other renamed a folder with half of them."""
    contents, target = example(), tmp_path / "weights"
    write(tmp_path / "run", contents, Setting(2, 2))
    if exists:
        target.mkdir()
        (target / "pytorch_model-00001-of-00009.bin").write_bytes(b"of an earlier run")
    meet_before(monkeypatch, consolidate, "_copy_model_files")

    def convert(size: str) -> None:
        consolidate.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", target, max_shard_size=size)

    both(lambda: convert("1KB"), lambda: convert("2KB"))
    files = sorted(target.glob("*.bin"))
    assert all(path.name.endswith(f"-of-{len(files):05d}.bin") for path in files)
    found = {name: value for path in files for name, value in torch.load(path).items()}
    assert all(torch.equal(found[name], value.float()) for name, value in contents.trainable.items())
    assert not staged(tmp_path)


def test_two_of_the_other_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other writers with the same problem: universal and ordinary checkpoints, single files, an analyzer's rows."""
    contents = example()
    source = write(tmp_path / "run", contents, Setting(2, 2))
    last = list(open_checkpoint(source).shapes)[-1]
    universal, barrier = tmp_path / "universal", FORK.Barrier(2, timeout=30)
    both(*[lambda: convert_to_universal(source, universal, lambda name: name == last and barrier.wait())] * 2)
    view = open_checkpoint(tmp_path, "universal")
    assert all(torch.equal(view.read(name), value.flatten()) for name, value in contents.trainable.items())

    whole = tmp_path / "whole.bin"
    both(*[lambda: consolidate.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "run", whole)] * 2)
    assert set(torch.load(whole)) >= set(contents.trainable)

    def rows(value: int) -> Iterator[list[int]]:
        yield [value] * value
        barrier.wait()

    both(lambda: write_rows(tmp_path / "rows", rows(3), np.uint8), lambda: write_rows(tmp_path / "rows", rows(5), "u1"))
    written = IndexedRows(tmp_path / "rows")
    assert written.lengths.tolist() in ([3], [5]) and written.flat().tolist() in ([3] * 3, [5] * 5)

    meet_before(monkeypatch, transaction, "write_manifest")
    for _ in range(2):  # first under a new name, then under an existing one
        both(*[lambda: write(tmp_path / "alone", contents, Setting(2, 1))] * 2)
        check_folder(open_checkpoint(tmp_path / "alone").folder.path)
    assert not staged(tmp_path)


def test_what_a_killed_process_left_is_removed_and_what_another_uses_is_not(tmp_path: Path) -> None:
    used = StagingFolder(tmp_path, "step")
    child = os.fork()
    if child == 0:
        StagingFolder(tmp_path, "step")
        os._exit(0)
    os.waitpid(child, 0)
    assert len(staged(tmp_path)) == 2
    another = StagingFolder(tmp_path, "step")
    assert sorted(staged(tmp_path)) == sorted([used.path.name, another.path.name])
    used.remove()
    another.remove()
    assert not staged(tmp_path)
