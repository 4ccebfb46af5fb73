"""No failure during a save damages an earlier checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_zero.checkpoint import CheckpointError, open_checkpoint
from hf_zero.checkpoint.transaction import check_folder, intact_alternatives, leftovers
from tests.checkpoint.disk_calls import DiskCalls
from tests.checkpoint.writer import Setting, example, write

OLD, NEW = Setting(2, 1, tag="global_step3"), Setting(2, 1, tag="global_step4")


def dies_at(call: int, act: Callable[[], Any]) -> bool:
    """Runs `act` in a fork that exits right before its `call`-th disk change; returns whether it got there."""
    child = os.fork()
    if child == 0:
        try:
            with DiskCalls(call, lambda: os._exit(9)):
                act()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize(
    ("new_tag", "every"),
    [
        ("global_step3", 5),  # this many calls
        pytest.param("global_step3", 1, marks=pytest.mark.slow),
        pytest.param("global_step4", 1, marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint_under_latest(
    tmp_path: Path, new_tag: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`global_step3` again: overwriting an existing tag must not lose its old content either."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # still counted; no power failure is simulated
    first, second = example(), example()
    call, outcomes = 1 - every, set()
    while True:
        call += every
        root = tmp_path / str(call)
        write(root, first, OLD)
        was_killed = dies_at(call, lambda: write(root, second, Setting(2, 1, tag=new_tag)))  # noqa: B023
        view = open_checkpoint(root)
        check_folder(view.folder.path)
        scale = view.read("scale").item()
        assert scale in (first.trainable["scale"].item(), second.trainable["scale"].item())
        outcomes.add(scale)
        assert all(path.name.startswith(".") for path in leftovers(root))
        # The next save works, and cleans up.
        write(root, second, Setting(2, 1, tag=new_tag))
        check_folder(open_checkpoint(root).folder.path)
        assert leftovers(root) == []
        if not was_killed:
            break
        shutil.rmtree(root)
    assert call > 20 and len(outcomes) == 2


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
def test_a_rank_that_cannot_write_fails_all_and_leaves_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: OSError
) -> None:
    write(tmp_path, example(), Setting(3, 2))
    original = os.pwrite

    def fails(file: int, block: Any, offset: int) -> int:
        if "rank_1" in os.readlink(f"/proc/self/fd/{file}"):
            raise failure
        return original(file, block, offset)

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(CheckpointError, match=r"global_step4: was not written: rank 1 could not write its files .*OSE"):
        write(tmp_path, example(), Setting(3, 2, tag="global_step4"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step3", "latest", "zero_to_fp32.py"]
    check_folder(open_checkpoint(tmp_path).folder.path)


def test_what_cannot_be_read_back_is_refused_before_it_is_written(tmp_path: Path) -> None:
    contents = example()
    contents.client_state["when"] = Path("x")
    with pytest.raises(
        CheckpointError, match=r"would hold pathlib\.\w+, which torch.load\(weights_only=True\) refuses"
    ):
        write(tmp_path, contents, OLD)
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_file_is_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", example(), Setting(2, 2))
    other = write(tmp_path / "b", example(), Setting(2, 2))
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other / name, folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: differs from its checksum"):
        check_folder(folder)
    shutil.copy(folder / name, other / name.replace("rank_1", "rank_2"))
    with pytest.raises(CheckpointError, match="rank_2_mp_rank_00_optim_states.pt: does not belong to this checkpoint"):
        check_folder(other)


def test_the_newest_intact_checkpoint_is_found(tmp_path: Path) -> None:
    folders = [write(tmp_path, example(), Setting(2, 1, tag=f"global_step{step}")) for step in (1, 2, 3)]
    for age, folder in enumerate(folders):
        os.utime(folder, (1000 + age, 1000 + age))
    next(folders[1].glob("*optim_states.pt")).write_bytes(b"damaged")
    assert intact_alternatives(tmp_path, "global_step3") == [folders[0]]
    assert intact_alternatives(tmp_path, "global_step1") == [folders[2]]
