"""At the end of a process, all threads of process groups must end before the interpreter is finalized."""

from __future__ import annotations

import json
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

from hf_zero import initialize
from hf_zero.comm import groups as comm_groups
from hf_zero.comm import process_group
from hf_zero.comm.cpu import shared_memory
from hf_zero.sequence.groups import SequenceGroups
from tests.comm.failing import MANNERS, PHASES, RANKS, VICTIM, Ended, Failure
from tests.support.launch import ROOT
from tests.support.ranks import run_ranks

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


def _run(module: str, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", module, *words], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _ends_of(failures: list[Failure]) -> dict[Failure, list[Ended]]:
    lines = _run("tests.comm.failing", *map(str, failures)).splitlines()
    return {Failure.named(name): [Ended(*end) for end in ends] for name, ends in map(json.loads, lines)}


def _check_the_end_of_all(failure: Failure, ends: list[Ended]) -> None:
    codes = [end.code for end in ends]
    assert codes[VICTIM] == {"raise": 1, "exit": 3, "kill": -9}[failure.manner], (str(failure), ends)
    for other in set(range(RANKS)) - {VICTIM}:
        assert codes[other] == 1, (str(failure), ends)
        reason = "ValueError: planted" if failure.manner == "raise" and failure.backend != "gloo" else ""
        assert f"rank {VICTIM} " in ends[other].output and reason in ends[other].output, (str(failure), ends)


def test_a_rank_that_ends_alone_ends() -> None:
    """One rank of a training on GPUs raised an error, and all ranks hung: at exit the rank destroyed its groups, which
    for NCCL waits for collectives in flight and for the other ranks, and these waited for its collectives. The launcher
    saw neither the error nor an exit.

    Its groups are now aborted. Ranks without errors still destroy theirs if all leave, but other ranks may have more to
    do (a last evaluation, saving the model). Here destroying a gloo group waits like NCCL's (`tests.comm.failing`).
    """
    failures = [
        Failure("nccl", 2, "backward", "raise"),
        Failure("nccl", 2, "step", "exit"),
        Failure("nccl", 3, "forward", "kill"),
        Failure("stuck", 2, "save", "raise"),
    ]
    regular = [Failure("nccl", 3, "end", "together"), Failure("nccl", 2, "end", "alone")]
    found = _ends_of(failures + regular)
    for failure in failures:
        _check_the_end_of_all(failure, found[failure])
    for failure in regular:
        ends = found[failure]
        assert [end.code for end in ends] == [0, 0], (str(failure), ends)
        assert "Error" not in "".join(end.output for end in ends)


@pytest.mark.parametrize(
    ("backend", "has_failed", "expected"),
    [("cuda:nccl", False, []), ("cuda:nccl", True, ["abort"]), ("cpu:gloo,cuda:nccl", True, ["abort"])],
    ids=str,
)
def test_groups_of_nccl_alone_belong_to_the_program(backend: str, has_failed: bool, expected: list[str]) -> None:
    """Trainer's, for example: after a run without errors they are left as they are. Several groups in flight can only
    be aborted together, so an error aborts all."""
    done: list[str] = []
    replaced = {
        "_HOLDERS": (),
        "backend_name": lambda: backend,
        "is_initialized": lambda: True,
        "get_rank": lambda: 0,
        "get_world_size": lambda: 2,
        "kind_of_backend": lambda name: "cuda",
        "store_of_job": torch.distributed.HashStore,
        "_has_failed": lambda: has_failed,
        "_abort": lambda: done.append("abort"),
        "destroy_process_group": lambda: done.append("destroy"),
    }
    with mock.patch.multiple(process_group, **replaced):
        process_group._leave()
    assert done == expected


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_rank_that_ends_alone_ends_in_every_phase(backend: str) -> None:
    """The others end within seconds of its end (an exiting rank first waits for them, see `process_group._leave`)."""
    failures = [Failure(backend, stage, phase, how) for stage in (2, 3) for phase in PHASES for how in MANNERS]
    found = _ends_of(failures)
    for failure in failures:
        ends = found[failure]
        _check_the_end_of_all(failure, ends)
        assert max(end.seconds for end in ends) < ends[VICTIM].seconds + 5, (str(failure), ends)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("by", ["engine", "accelerate"])
def test_processes_end_by_themselves(by: str) -> None:
    """Ninety of them on a busy machine; `python -m tests.comm.ends --worlds 170` runs five hundred."""
    _run("tests.comm.ends", "--worlds", "30", "--at-once", "3", "--by", by)
