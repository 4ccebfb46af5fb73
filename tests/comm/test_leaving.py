"""At the end of a process, all threads of process groups must end before the interpreter is finalized."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from hf_zero.api.entry import initialize
from hf_zero.comm import groups as comm_groups
from hf_zero.comm import process_group
from hf_zero.comm.cpu import shared_memory
from hf_zero.sequence.groups import SequenceGroups
from tests.support.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
KEPT: list[Any] = []  # like a script's globals, which live until its end


def _threads() -> list[str]:
    names = (Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task"))
    return sorted(name for name in names if "gloo" in name)


def _run_to_its_end(rank: int, stage: int) -> tuple[list[str], list[str]]:
    """(gloo's threads while an engine lives, and after the process has left its groups)."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    for host in ("one", f"of rank {rank}"):  # as on one machine, and as on two, where ranks negotiate by gloo
        comm_groups._worlds.clear()
        with mock.patch.object(shared_memory, "host_name", lambda host=host: host):
            engine = initialize(model=nn.Linear(3, 3), config=config)[0]
            engine.backward(engine(torch.ones(1, 3)).sum())
            engine.step()
            groups = SequenceGroups.of_size(2)
            KEPT.extend([engine, groups, comm_groups.background_collectives(), comm_groups.watching_collectives()])
    before = _threads()
    process_group._leave()
    patience = time.monotonic() + 5
    while _threads() and time.monotonic() < patience:
        time.sleep(0.01)
    return before, _threads()


def test_groups_are_gone_though_engines_are_not() -> None:
    """Three ranks at stage 3, resumed from a checkpoint of two on a busy machine: in about one of forty runs a rank
    silently ended with SIGABRT, after its last line of output.

    Groups were destroyed at exit, but their threads lived on: gloo's threads end with the last reference to their
    group, which engines, their shared objects and the list of ranks still had. An engine that nobody has destroyed
    outlives the interpreter.
    """
    for before, after in run_ranks(_run_to_its_end, 2, 3):
        assert len(before) >= 6 and after == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("by", ["engine", "accelerate"])
def test_processes_end_by_themselves(by: str) -> None:
    """Ninety of them on a busy machine; `python -m tests.comm.ends --worlds 170` runs five hundred."""
    words = ["--worlds", "30", "--at-once", "3", "--by", by]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.comm.ends", *words], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
