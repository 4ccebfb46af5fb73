"""If a rank dies or hangs in the middle of a Trainer run, the others end soon and name it."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import hf_zero

hf_zero.install()

from hf_zero import comm  # noqa: E402
from hf_zero.comm import known_groups, process_group  # noqa: E402
from hf_zero.comm.known_groups import _place, _Process  # noqa: E402
from tests.integration.flows import BASE, clean, trainer  # noqa: E402
from tests.support.ranks import RankFailure, run_ranks  # noqa: E402

VICTIM = 1


def stopping_at(forward: int, model: nn.Module, how: str) -> None:
    """From this forward pass on, the rank is dead or hangs."""
    passes = 0

    def hook(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes == forward:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)

    model.register_forward_pre_hook(hook)


def run_until_it_stops(rank: int, folder: str, stage: int, how: str, options: dict[str, object]) -> None:
    """Trains; the rank's final message is written to a file."""
    clean()
    said = Path(folder, f"said-{rank}")
    logging.getLogger("hf_zero").addHandler(logging.FileHandler(said))
    config = {**BASE, "zero_optimization": {"stage": stage}}
    one = trainer(Path(folder), config, max_steps=50, **options)
    if rank == VICTIM:
        stopping_at(3, one.model, how)
    try:
        one.train()
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a program
        with said.open("a") as file:
            file.write(f"{error}\n")
        raise


@pytest.mark.parametrize(("world", "stage"), [(2, 2), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_a_killed_rank_is_named_by_the_others(world: int, stage: int, tmp_path: Path) -> None:
    """Trainer's own collectives (loss, token counts) are involved, and gloo does not know which rank was lost."""
    with pytest.raises(RankFailure, match=f"rank {VICTIM} of {world} failed first"):
        run_ranks(run_until_it_stops, world, str(tmp_path), stage, "killed", {}, init=False)
    for rank in set(range(world)) - {VICTIM}:
        assert f"rank {VICTIM} " in (tmp_path / f"said-{rank}").read_text()


def run_barrier(rank: int, folder: str) -> None:
    """A collective of the script itself, unknown to hf_zero's exchange through shared memory."""
    said = Path(folder, f"said-{rank}")
    logging.getLogger("hf_zero").addHandler(logging.FileHandler(said))
    comm.collectives_for(torch.device("cpu"))
    torch.distributed.barrier()
    if rank == VICTIM:
        os._exit(9)
    try:
        torch.distributed.barrier()
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise


def test_a_rank_lost_by_the_back_end_is_named(tmp_path: Path) -> None:
    """Gloo only reports "Connection closed by peer" and a port."""
    with pytest.raises(RankFailure, match=f"rank {VICTIM} of 2 failed first"):
        run_ranks(run_barrier, 2, str(tmp_path))
    assert f"another one has exited: rank {VICTIM} (process" in (tmp_path / "said-0").read_text()


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_after_ddp_timeout(tmp_path: Path) -> None:
    """transformers ignores ddp_timeout for ranks on CPUs, so the others waited half an hour."""
    with pytest.raises(RankFailure):
        run_ranks(run_until_it_stops, 2, str(tmp_path), 2, "hanging", {"ddp_timeout": 5}, init=False)
    said = (tmp_path / "said-0").read_text()
    assert f"rank {VICTIM} has not responded for 5 seconds" in said or "one of them does not respond" in said


def run_timeouts(rank: int, folder: str) -> list[float]:
    clean()
    one = trainer(Path(folder), dict(BASE), ddp_timeout=77)
    one.train()
    background = comm.background_collectives()
    known = comm.groups._known()
    link = known.linked()[0]
    assert link is not None
    groups = [
        torch.distributed.group.WORLD,
        background._group,
        known.native_group(0, comm.Channel.GATHER),
    ]
    device = torch.device("cpu")
    torch.distributed.barrier()  # rank 0 keeps the store through which the other rank creates its groups
    return [link.timeout_s, *(group._get_backend(device).options._timeout.total_seconds() for group in groups)]


def test_ddp_timeout_holds_for_every_group_that_we_make(tmp_path: Path) -> None:
    assert run_ranks(run_timeouts, 2, str(tmp_path), init=False) == [[77.0] * 4] * 2


def run_raised(rank: int) -> list[float]:
    """The group exists before its timeout is set."""
    before = comm.collectives_for(torch.device("cpu"))
    comm.set_timeout(timedelta(seconds=33))
    return [before._link.link.timeout_s, comm.process_group.common_timeout().total_seconds()]


def test_a_timeout_reaches_what_is_already_connected() -> None:
    assert run_ranks(run_raised, 2) == [[33.0, 33.0]] * 2


def test_the_message_about_dead_ranks_knows_who_has_ended_here_and_who_is_elsewhere() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:  # not reaped yet, as under a launcher
        time.sleep(0.01)
    here = _Process(1, "this-one", _place(), ended.pid)
    alive = _Process(2, "this-one", _place(), os.getpid())
    away = _Process(3, "another-one", "elsewhere", 1)
    assert f"rank 1 (process {ended.pid}) on this-one" in known_groups.describe_dead([alive, here, away])
    ended.wait()
    assert "rank 1 " in known_groups.describe_dead([here])
    assert "one on another-one has exited" in known_groups.describe_dead([alive, away], patience_s=0)
    assert "does not respond" in known_groups.describe_dead([alive], patience_s=0)


def test_a_rank_that_has_recorded_its_end_is_named_while_its_process_exists() -> None:
    """It may abort collectives or write logs for seconds, and on another machine nothing else tells it from others."""
    alive, away = _Process(2, "this-one", _place(), os.getpid()), _Process(3, "another-one", "elsewhere", 1)
    store = torch.distributed.HashStore()
    store.set(process_group.ENDED, "2")
    assert known_groups.describe_dead([alive, away], store).endswith(
        f"has ended: rank 2 (process {os.getpid()}) on this-one"
    )
    store.set(known_groups.FAILED, "3 ValueError: too short")
    expected = "another one has failed: rank 3 (process 1) on another-one: ValueError: too short"
    assert known_groups.describe_dead([alive, away], store).endswith(expected)


def test_a_rank_that_is_stopped_is_named() -> None:
    """After SIGSTOP, or in a debugger, its process exists and its connections are open."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stopped:
        os.kill(stopped.pid, signal.SIGSTOP)
        while psutil.Process(stopped.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        here = _Process(1, "this-one", _place(), stopped.pid)
        alive = _Process(2, "this-one", _place(), os.getpid())
        told = known_groups.describe_dead([alive, here], patience_s=0)
        stopped.kill()
    assert f"rank 1 (process {stopped.pid}) on this-one is stopped" in told
