"""Checkpoints in host memory: their content, the choice of one, and training without room for them."""

from __future__ import annotations

import errno
import json
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hf_zero.checkpoint import CheckpointError, background
from hf_zero.checkpoint.arena import Arena
from hf_zero.comm import ledger
from hf_zero.comm.cpu import shared_memory
from hf_zero.comm.process_group import store_of_job
from hf_zero.extras.resilience.memory import MemoryCheckpoints, supervisor
from tests.checkpoint.training import new_engine, train
from tests.support.ranks import run_each, run_ranks

OFFLOAD = {"device": "cpu"}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 0": (0, {}),
    "stage 1": (1, {"bf16": {"enabled": True}}),
    "stage 2": (2, {}),
    "stage 2, bf16, offload": (
        2,
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "offload_optimizer": OFFLOAD}},
    ),
    "stage 3": (3, {}),
    "stage 3, offload": (
        3,
        {"zero_optimization": {"stage": 3, "offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}},
    ),
    "stage 3, 8-bit": (3, {"optimizer": {"type": "Adam8bit", "params": {"lr": 1e-2}}}),
    "Muon": (2, {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}),
}


def everything_mapped() -> Any:
    """Small tensors are normally copied into the description; here all are in the files, like large ones."""
    return mock.patch.object(Arena, "SMALL_BYTES", 0)


def add(rank: int, update: int, folder: Path) -> None:
    (folder / f"added-{rank}").write_text(str(update))


def own_part(rank: int, folder: str, per_host: int) -> tuple[Path, Any]:
    """The folder of this rank's host, and a patch of the host's name."""
    host = f"host-{rank // per_host}"
    return Path(folder) / host, mock.patch.object(shared_memory, "host_name", lambda: host)


def run_keeps(rank: int, kind: str, folder: str, updates: int, num_kept: int) -> tuple[list[float], int]:
    """Keeps a checkpoint after each of the first updates; returns losses, and the elements exchanged between ranks."""
    stage, sections = KINDS[kind]
    world = torch.distributed.get_world_size()
    engine, losses = new_engine(stage, world, **sections), []
    memory = MemoryCheckpoints(Path(folder), engine.groups.world)
    assert memory.newest() is None
    ledger.reset()
    num_keys = []
    with everything_mapped():
        for update in range(1, updates + 1):
            losses += train(engine, rank, world, range(update - 1, update))
            if update <= num_kept:
                memory.keep(engine, update, partial(add, rank, update))
                num_keys.append(store_of_job().num_keys())
    assert len(set(num_keys[1:])) <= 1, "every update leaves something in the job's store"
    memory.close()
    numel = sum(t.numel for (phase, name), t in ledger.tallies.items() if "all_to_all" in name)
    engine.destroy()
    return losses, numel


def run_goes_on(rank: int, kind: str, folder: str, seed: int, updates: range) -> tuple[int, list[float]]:
    """A new engine with different weights loads the checkpoint; returns the update, and the losses from there on."""
    stage, sections = KINDS[kind]
    world = torch.distributed.get_world_size()
    engine = new_engine(stage, world, seed=seed, **sections)
    found = MemoryCheckpoints(Path(folder), engine.groups.world).newest()
    assert found is not None
    step, slot = found
    assert (slot / f"added-{rank}").read_text() == str(step)
    engine.load_checkpoint(str(slot))
    assert engine.module.seen[0] == step  # a buffer
    losses = train(engine, rank, world, range(step, updates.stop))
    engine.destroy()
    return step, losses


def run_keeps_and_goes_on(rank: int, per_host: int, kind: str, folder: str) -> tuple[bool, int]:
    """Whether losses after resuming are bitwise those without, and the exchanged elements."""
    own, named = own_part(rank, folder, per_host)  # a rank sees no other host's memory
    with named:
        losses, numel = run_keeps(rank, kind, str(own), 6, 3)
        step, resumed = run_goes_on(rank, kind, str(own), 5, range(3, 6))
    assert step == 3
    return resumed == losses[3:], numel


HOSTS = [(1, 2), (2, 1), (2, 2)]  # and ranks on each
# By default every kind on one host, which maps other ranks' memory, and few where hosts exchange descriptions.
BETWEEN_HOSTS = "stage 2, bf16, offload", "stage 3"
OF_TWO = "stage 1", "Muon"


@pytest.mark.parametrize(
    ("kinds", "num_hosts", "per_host"),
    [
        pytest.param(tuple(KINDS), *HOSTS[0], id="one host"),
        pytest.param(BETWEEN_HOSTS, *HOSTS[1], id="two hosts"),
        pytest.param(OF_TWO, *HOSTS[2], id="two hosts of two"),
        pytest.param(tuple(KINDS), *HOSTS[1], id="two hosts, all kinds", marks=pytest.mark.slow),
        pytest.param(tuple(KINDS), *HOSTS[2], id="two hosts of two, all kinds", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_to_the_bit(kinds: tuple[str, ...], num_hosts: int, per_host: int, tmp_path: Path) -> None:
    """Values are copied once: below stage 3, where files contain other ranks' shards, ranks map one another's memory.
    Between hosts only descriptions are sent, no values, neither for keeping nor for loading."""
    world = num_hosts * per_host
    found = run_each(run_keeps_and_goes_on, world, [(per_host, kind, str(tmp_path / kind)) for kind in kinds])
    assert dict(zip(kinds, found, strict=True)) == dict.fromkeys(kinds, [(True, 0)] * world)
    assert not [path for path in tmp_path.glob("*/host-1/*/rank-0.[0-9]*") if path.stat().st_size]


def flip(path: Path) -> None:
    """Flips one bit of a value."""
    with path.open("r+b") as file:
        file.seek(1000)
        (byte,) = file.read(1)
        file.seek(1000)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("stage", [2, 3])
def test_values_that_changed_by_themselves_are_not_taken(stage: int, tmp_path: Path) -> None:
    """A bit of rank 1's last checkpoint flips: all ranks resume from the previous one; with both flipped, from none."""
    kind = f"stage {stage}"
    whole = run_ranks(run_keeps, 2, kind, str(tmp_path), 4, 4)
    newest = next(p for p in tmp_path.glob("*/rank-1.json") if json.loads(p.read_text())["step"] == 4)
    flip(newest.with_name("rank-1.0"))
    resumed = run_ranks(run_goes_on, 2, kind, str(tmp_path), 5, range(3, 4))
    assert resumed == [(3, losses[3:]) for losses, _ in whole]
    flip(tmp_path / str(1 - int(newest.parent.name)) / "rank-0.0")
    assert run_ranks(run_newest, 2, str(tmp_path)) == [None, None]


def run_replicates(rank: int, folder: str) -> list[bool]:
    engine = new_engine(2, 2)
    memory, kept = MemoryCheckpoints(Path(folder), engine.groups.world, replicates=True), []
    for update in range(1, 5):
        train(engine, rank, 2, range(update - 1, update))
        kept.append(memory.keep(engine, update, partial(add, rank, update)))
        memory.wait()
        if update == 3 and rank == 0:
            (Path(folder) / "0" / "copied").write_text(json.dumps({"step": 1}))
        engine.groups.world.gather_objects(None)
    memory.close()
    engine.destroy()
    return kept


def test_the_last_slot_that_all_hosts_have_copied_stays(tmp_path: Path) -> None:
    """If the link is slower than training, checkpoints wait for it, and training does not."""
    assert run_ranks(run_replicates, 2, str(tmp_path)) == [[True, False, False, True]] * 2


def test_it_loads_on_another_number_of_ranks(tmp_path: Path) -> None:
    (losses, _), _ = run_ranks(run_keeps, 2, "stage 3", str(tmp_path / "six"), 6, 0)
    run_ranks(run_keeps, 2, "stage 3", str(tmp_path / "three"), 3, 3)
    ((step, alone),) = run_ranks(run_goes_on, 1, "stage 3", str(tmp_path / "three"), 5, range(3, 6))
    assert step == 3
    torch.testing.assert_close(alone, losses[3:], rtol=1e-5, atol=0)


def run_newest(rank: int, folder: str) -> int | None:
    engine = new_engine(2, 2)
    found = MemoryCheckpoints(Path(folder), engine.groups.world).newest()
    engine.destroy()
    return None if found is None else found[0]


def test_a_checkpoint_counts_when_all_ranks_have_it(tmp_path: Path) -> None:
    """A rank killed while it keeps a checkpoint has removed its mark in that slot; the other slot is complete."""
    run_ranks(run_keeps, 2, "stage 2", str(tmp_path), 4, 4)
    assert run_ranks(run_newest, 2, str(tmp_path)) == [4, 4]
    marks = {path: json.loads(path.read_text())["step"] for path in tmp_path.glob("*/rank-*.json")}
    assert sorted(marks.values()) == [3, 3, 4, 4]
    next(path for path, step in marks.items() if step == 4).unlink()
    assert run_ranks(run_newest, 2, str(tmp_path)) == [3, 3]
    next(path for path, step in marks.items() if step == 3).write_text("")
    assert run_ranks(run_newest, 2, str(tmp_path)) == [None, None]


def run_without_room(rank: int, folder: str, stage: int) -> tuple[str, list[float]]:
    engine = new_engine(stage, 2)
    train(engine, rank, 2, range(1))
    memory, real = MemoryCheckpoints(Path(folder), engine.groups.world), os.posix_fallocate

    def full(descriptor: int, start: int, num_bytes: int) -> None:
        if rank == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, start, num_bytes)

    said = ""
    with everything_mapped(), mock.patch.object(os, "posix_fallocate", full):
        try:
            memory.keep(engine, 1, lambda folder: None)
        except CheckpointError as error:
            said = str(error)
    losses = train(engine, rank, 2, range(1, 3))
    memory.close()
    engine.destroy()
    return said, losses


@pytest.mark.parametrize("stage", [2, 3])
def test_without_room_all_ranks_hear_of_it_and_train_on(stage: int, tmp_path: Path) -> None:
    """A missing page of a mapped file would end the process with SIGBUS on a write."""
    (first, losses), (second, _) = run_ranks(run_without_room, 2, str(tmp_path), stage)
    assert "No space left on device" in first and "No space left on device" in second
    assert len(losses) == 2


def test_frozen_weights_are_copied_once() -> None:
    """The base model under adapters is most of the model, and usually constant; after a write it is copied again."""
    frozen, arena = nn.Parameter(torch.ones(2000), requires_grad=False), Arena()

    def kept() -> torch.Tensor:
        found = background.Snapshot(arena, None, [frozen]).keep(frozen)
        assert isinstance(found, torch.Tensor)
        return found

    assert kept().sum() == 2000
    kept().fill_(3)  # shows whether it is copied
    assert kept().sum() == 6000
    with torch.no_grad():
        frozen.add_(1)
    assert kept().sum() == 4000


def test_who_starts_ranks_again() -> None:
    assert supervisor({"HF_ZERO_SUPERVISOR": "17"}) == 17
    assert supervisor({"TORCHELASTIC_MAX_RESTARTS": "3"}) == os.getppid()
    assert supervisor({"TORCHELASTIC_MAX_RESTARTS": "0"}) is None
    assert supervisor({}) is None
