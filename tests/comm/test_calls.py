"""A call that all ranks must make, made by one rank alone: each rank that waits says soon where the others are."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hf_zero import initialize
from hf_zero.comm import barrier, calls, collectives_for, enter, known_groups
from hf_zero.comm.cpu import shared_memory
from hf_zero.comm.groups import set_timeout
from tests.support.launch import ROOT
from tests.support.ranks import free_port, run_ranks

SECONDS = 30.0  # far less than the timeout of half an hour, and more than a busy machine needs


def _engine(stage: int, rank: int, hosts: str) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    host = f"of rank {rank}" if hosts == "several" else "one"
    with mock.patch.object(shared_memory, "host_name", lambda: host):
        return initialize(model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), config=config)[0]


class _Said(logging.Handler):
    """The log, with the seconds since the beginning."""

    def __init__(self) -> None:
        super().__init__()
        self._begin = time.monotonic()
        self.lines: list[tuple[str, float]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.getMessage(), time.monotonic() - self._begin))


def _train(engine: Any, updates: int = 1) -> None:
    for _ in range(updates):
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()


def run_save_on_rank_0(rank: int, folder: str, stage: int, call: str, hosts: str) -> list[tuple[str, float]]:
    """Rank 0 saves alone, the other one trains; returns what each of them has said, and its error."""
    engine = _engine(stage, rank, hosts)
    _train(engine)
    said = _Said()
    logging.getLogger("hf_zero").addHandler(said)
    set_timeout(timedelta(seconds=SECONDS / 2))
    try:
        if rank == 0:
            getattr(engine, call)(folder)
        else:
            _train(engine)
    except RuntimeError as error:
        said.lines.append((str(error), time.monotonic() - said._begin))
        return list(said.lines)
    raise AssertionError(f"rank {rank} went on")


@pytest.mark.parametrize(
    ("stage", "call"),
    [
        (0, "save_checkpoint"),
        pytest.param(1, "save_checkpoint", marks=pytest.mark.slow),
        pytest.param(2, "save_16bit_model", marks=pytest.mark.slow),
        (3, "save_checkpoint"),
        pytest.param(3, "save_16bit_model", marks=pytest.mark.slow),
    ],
)
def test_a_save_below_if_rank_0_beside_training_is_named_on_both_ranks(stage: int, call: str, tmp_path: Path) -> None:
    """`if rank == 0: engine.save_checkpoint(...)`: the job stood still, with "nothing from rank 0" after a minute and
    an error after half an hour, or gloo's raw text on one rank and "rank 1 has exited" on the other."""
    saves, trains = run_ranks(run_save_on_rank_0, 2, str(tmp_path), stage, call, "one")
    error, seconds = saves[-1]
    assert f"this rank is in {call}" in error and "rank 1 waits for it" in error and f"Call {call} on every" in error
    assert seconds < SECONDS / 2
    error, seconds = trains[-1]
    assert f"rank 0 is in {call}: call it on every rank" in error and "in " in error
    assert seconds < SECONDS / 2


def test_between_hosts_both_ranks_say_so_in_the_log(tmp_path: Path) -> None:
    """Between hosts a rank waits inside of gloo, where it can only speak from another thread."""
    saves, trains = run_ranks(run_save_on_rank_0, 2, str(tmp_path), 2, "save_checkpoint", "several")
    early = [[line for line, seconds in said if seconds < SECONDS / 2] for said in (saves, trains)]
    assert any("this rank is in save_checkpoint and waits for rank 1" in line for line in early[0])
    assert any("rank 0 is in save_checkpoint: call it on every rank" in line for line in early[1])


def run_other_calls(rank: int, folder: str) -> str:
    engine = _engine(1, rank, "one")
    try:
        engine.save_checkpoint(folder) if rank == 0 else engine.load_checkpoint(folder)
    except RuntimeError as error:
        return str(error)
    return ""


def test_two_calls_that_are_both_for_all_ranks_are_told_apart(tmp_path: Path) -> None:
    saves, loads = run_ranks(run_other_calls, 2, str(tmp_path))
    assert "this rank is in save_checkpoint, but rank 1" in saves and "load_checkpoint" in saves
    assert "this rank is in load_checkpoint, but rank 0" in loads and "save_checkpoint" in loads


def run_late(rank: int) -> list[str]:
    """Rank 1 comes late, and nothing is wrong."""
    said = _Said()
    logging.getLogger("hf_zero").addHandler(said)
    for _ in range(2):
        if rank == 1:
            time.sleep(calls.PATIENCE_S + 1.5)
        enter("call")
    barrier()
    return [line for line, _ in said.lines]


def test_a_rank_that_comes_late_is_waited_for() -> None:
    assert run_ranks(run_late, 2) == [[], []]


def run_beside_a_dead_process(rank: int) -> str:
    """To the others, rank 1 is a process that has been killed."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    with mock.patch("os.getpid", lambda: dead.pid) if rank == 1 else nullcontext():
        collectives_for(torch.device("cpu"))
    said = said_by_a_save() if rank == 0 else ""
    barrier()
    return said


def said_by_a_save() -> str:
    """The error of a call that all ranks must make; empty without one."""
    try:
        enter("save_checkpoint")
    except RuntimeError as error:
        return str(error)
    return ""


FOR_A_DEAD_RANK = r"this rank waits in save_checkpoint for rank 1 \(process \d+\), which has exited"


def test_a_rank_that_was_killed_is_not_waited_for() -> None:
    """It leaves nothing in the job's store, and the store does not close connections."""
    said, _ = run_ranks(run_beside_a_dead_process, 2)
    assert re.fullmatch(FOR_A_DEAD_RANK, said)


def run_beside_a_dead_machine(rank: int, ends: bool) -> str:
    """Each rank is on a machine of its own; what the kernel does when a process ends closes the socket of rank 1."""
    with (
        mock.patch.object(known_groups, "_place", lambda: f"machine {rank}"),
        mock.patch.dict(os.environ, MASTER_ADDR="127.0.0.1"),
    ):
        collectives_for(torch.device("cpu"))
        listener = known_groups._known.listener
        assert listener is not None
        if rank == 1 and ends:
            listener.close()
        if rank == 1:
            time.sleep(2 * calls.TICK_S)
        said = "" if rank == 1 and ends else said_by_a_save()
    barrier()
    return said


@pytest.mark.parametrize("ends", [True, False])
def test_a_rank_of_another_machine_that_was_killed_is_not_waited_for(ends: bool) -> None:
    """A node that was lost before it came to a save let the others wait for the timeout of half an hour, and the
    launcher did not restart them: a rank only saw the processes of its own machine."""
    said = run_ranks(run_beside_a_dead_machine, 2, ends)
    assert re.fullmatch(FOR_A_DEAD_RANK if ends else "", said[0]) and not said[1]


SCRIPT = """
import os, sys, torch, hf_zero
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": STAGE}}
engine = hf_zero.initialize(model=torch.nn.Linear(8, 1), config=config)[0]
engine.backward(engine(torch.ones(1, 8)).sum())
engine.step()
if os.environ["RANK"] == "0":
    engine.save_checkpoint(sys.argv[1])
"""


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_a_save_by_rank_0_alone_at_the_end_of_a_script_says_that_the_others_have_ended(
    stage: int, tmp_path: Path
) -> None:
    """Rank 0 showed gloo's "Connection closed by peer", which says nothing about a save."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("STAGE", str(stage)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "out")],
        capture_output=True, text=True, cwd=ROOT, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode != 0
    assert "this rank is in save_checkpoint, but rank 1 has reached the end of its program" in done.stderr
    assert "Call save_checkpoint on every rank" in done.stderr
    assert time.monotonic() - begin < 100
