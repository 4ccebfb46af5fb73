"""A drive failure stops every rank with the reason, wherever it occurs, and earlier checkpoints stay valid."""

from __future__ import annotations

import errno
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_zero import initialize
from hf_zero.api import parameter_access
from hf_zero.offload import swap_store as drives
from hf_zero.offload.swap_store import FileAccess
from hf_zero.offload.vector import StorageError
from tests.offload.offload_runs import ROWS, Run, assert_same_bits, engine_for, train, train_run, weights_of
from tests.offload.refusing_access import RefusingAccess
from tests.offload.test_offload import on_drive
from tests.support.models import mlp_batches
from tests.support.ranks import RankFailure, run_each, run_ranks


class FailingOnce(RefusingAccess):
    """Fails permanently from a given operation on."""

    def __init__(self, verb: str, error: int) -> None:
        self._verb = verb
        self._error = error
        self.is_broken = False

    def check(self, verb: str) -> None:
        if self.is_broken and verb == self._verb:
            raise OSError(self._error, os.strerror(self._error))


def break_drive(rank: int, run: Run, where: str, verb: str, error: int, folder: str) -> str:
    """Train a step and save, make rank 1's drive fail in `where`, and return this rank's error message."""
    access = FailingOnce(verb, error)
    if rank == 1:
        drives.ACCESS = access  # type: ignore[misc]
    engine = engine_for(run, 2)
    train(engine, run, rank, 2, steps=1)
    engine.save_checkpoint(folder)
    if where == "update":
        step = engine.optimizer.updater.step

        def breaking(gradients: object) -> object:
            access.is_broken = rank == 1
            return step(gradients)

        engine.optimizer.updater.step = breaking
    elif where == "backward":
        backward = engine.backward

        def breaking_now(loss: object) -> object:
            access.is_broken = rank == 1
            return backward(loss)

        engine.backward = breaking_now
    else:
        access.is_broken = rank == 1
    try:
        train(engine, run, rank, 2, first=1, steps=3)
    except StorageError as failure:
        return str(failure)
    return "trained on"


@pytest.mark.parametrize(
    ("stage", "where", "verb", "error"),
    [
        pytest.param(2, "update", "read", errno.EIO, marks=pytest.mark.slow),  # same as at stage 3
        pytest.param(1, "update", "write", errno.ENOSPC, marks=pytest.mark.slow),  # same as at stage 3
        (2, "backward", "write", errno.ENOSPC),
        (3, "update", "read", errno.EIO),
        (3, "forward, of parameters", "read", errno.EIO),
        pytest.param(3, "backward, of parameters", "read", errno.EIO, marks=pytest.mark.slow),  # as in forward
        (3, "update, of parameters", "write", errno.ENOSPC),
    ],
)
def test_all_ranks_stop_with_path_and_bytes(stage: int, where: str, verb: str, error: int, tmp_path: Path) -> None:
    """A shard that could not be read in forward raised on its rank only; the others reported a broken connection."""
    drive, saved = tmp_path / "drive", tmp_path / "saved"
    drive.mkdir()
    place, _, parameters = where.partition(", ")
    run = Run(stage, zero=on_drive(drive, parameters=bool(parameters)))
    messages = run_ranks(break_drive, 2, run, place, verb, error, str(saved))
    for message in messages:
        assert f"rank 1: could not {verb}" in message and os.strerror(error) in message and str(drive) in message
        assert "bytes at" in message
    assert not list(drive.iterdir()), "nothing is left on the drive"
    reference, resumed = run_each(load_and_go_on, 2, [(Run(stage), str(saved)), (run, str(saved))])
    assert all(torch.equal(resumed[0][name], value) for name, value in reference[0].items())


def load_and_go_on(rank: int, run: Run, folder: str) -> dict[str, torch.Tensor]:
    engine = engine_for(run, 2)
    assert engine.load_checkpoint(folder)[0] is not None
    train(engine, run, rank, 2, first=1, steps=2)
    return weights_of(engine)


def use_broken(rank: int, run: Run, use: str, folder: str) -> tuple[str, list[str]]:
    """Makes reads of rank 1's drive fail after a step, and `use`s the engine; (this rank's error, saved files)."""
    access = FailingOnce("read", errno.EIO)
    if rank == 1:
        drives.ACCESS = access  # type: ignore[misc]
    engine = engine_for(run, 2)
    train(engine, run, rank, 2, steps=1)
    access.is_broken = rank == 1
    batch = {key: value.chunk(2)[rank].bfloat16() for key, value in mlp_batches(1, ROWS)[0].items()}
    uses: dict[str, Callable[[], object]] = {
        "evaluate": lambda: engine.eval()(**batch),
        "gather": lambda: engine.module_state_dict(),
        "save": lambda: engine.save_checkpoint(folder),
        "read a master": lambda: parameter_access.safe_get_full_fp32_param(engine.module.inner.weight),
    }
    try:
        with torch.no_grad():
            uses["evaluate"]() if use == "save" else uses[use]()
    except StorageError as failure:
        if use != "save":
            return str(failure), []
    try:
        uses[use]()
    except StorageError as failure:
        return str(failure), [entry.name for entry in Path(folder).iterdir()]
    return "went on", []


@pytest.mark.parametrize("use", ["evaluate", "gather", "save", "read a master"])
def test_a_failed_drive_stops_all_ranks_outside_training_too(use: str, tmp_path: Path) -> None:
    drive, saved = tmp_path / "drive", tmp_path / "saved"
    drive.mkdir()
    saved.mkdir()
    run = Run(3, zero=on_drive(drive, parameters=True))
    for message, entries in run_ranks(use_broken, 2, run, use, str(saved)):
        assert "rank 1: could not read" in message and "Input/output error" in message and str(drive) in message
        assert not entries, "nothing is saved of what has been lost"


def start_on(rank: int, run: Run, after: int) -> str:
    """The drive of rank 1 is full after `after` reservations."""

    class Full(FileAccess):
        left = after

        def reserve(self, file: int, offset: int, num_bytes: int) -> None:
            self.left -= 1
            if rank == 1 and self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().reserve(file, offset, num_bytes)

    drives.ACCESS = Full()
    try:
        engine_for(run, 2)
    except StorageError as error:
        return str(error)
    return "started"


def test_a_drive_that_is_not_there_or_fills_up_at_the_start_stops_all_ranks_then(tmp_path: Path) -> None:
    there = Run(3, zero=on_drive(tmp_path, parameters=True))
    missing = Run(2, zero=on_drive(tmp_path / "unmounted", parameters=False))
    *full, unmounted = run_each(start_on, 2, [(there, 0), (there, 9), (missing, 99)])
    for message in itertools.chain(*full):
        assert "rank 1: " in message and "bytes more, and the drive has" in message and str(tmp_path) in message
    assert all("is not an existing folder" in message for message in unmounted)


def test_a_folder_that_goes_while_training_runs_does_no_harm(tmp_path: Path) -> None:
    """Its files are open; the system keeps them until they are closed."""
    drive = tmp_path / "drive"
    drive.mkdir()
    run = Run(2, zero=on_drive(drive, parameters=False))
    expected = train_run(0, 1, Run(2))
    engine = engine_for(run, 1)
    numbers = train(engine, run, 0, 1, steps=1)
    drive.rename(tmp_path / "gone")
    numbers += train(engine, run, 0, 1, first=1, steps=run.steps - 1)
    assert_same_bits((numbers, weights_of(engine)), expected)
    engine.destroy()


def killed_in_update(rank: int, run: Run, folder: str) -> None:
    """Rank 1 is killed after updating the second of its sub-groups, after a checkpoint and a partial step."""
    engine = engine_for(run, 2)
    train(engine, run, rank, 2, steps=1)
    engine.save_checkpoint(folder)
    updater, update, updated = engine.optimizer.updater, engine.optimizer.updater.update_sub_group, []

    def last_updates(sub_group: object, **arguments: object) -> None:
        update(sub_group, **arguments)
        updated.append(sub_group)
        if rank == 1 and len(updated) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    updater.update_sub_group = last_updates
    train(engine, run, rank, 2, first=1, steps=3)


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_rank_killed_in_its_update_costs_the_step_and_nothing_else(stage: int, tmp_path: Path) -> None:
    drive, saved = tmp_path / "drive", tmp_path / "saved"
    drive.mkdir()
    run = Run(stage, zero=on_drive(drive, parameters=stage == 3))
    with pytest.raises(RankFailure) as caught:
        run_ranks(killed_in_update, 2, run, str(saved))
    assert (caught.value.rank, caught.value.kind) == (1, "Died")
    assert list(drive.iterdir()), "what the killed rank left"
    [resumed, _], [expected, _] = run_each(load_and_go_on, 2, [(run, str(saved)), (Run(stage), str(saved))])
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
    assert not list(drive.iterdir())


def killed_alone(rank: int, drive: str) -> None:
    """A single-process program is killed at the start of its third update."""
    model = torch.nn.Linear(50, 50)
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": drive}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    engine, *_ = initialize(model=model, model_parameters=model.parameters(), config=config)
    for number in range(3):
        if number == 2:
            engine.optimizer.updater.stager.each = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        engine.backward(engine(torch.ones(2, 50)).square().mean())
        engine.step()


def test_what_a_killed_run_leaves_goes_with_the_next(tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(killed_alone, 1, str(tmp_path))
    assert (caught.value.rank, caught.value.kind) == (0, "Died")
    assert len(list(tmp_path.iterdir())) == 1
    runs = Run(2, zero=on_drive(tmp_path, parameters=False)), Run(2)
    [outcome], [expected] = run_each(train_run, 1, [(1, run) for run in runs])
    assert outcome[0] == expected[0]
    assert not list(tmp_path.iterdir())
