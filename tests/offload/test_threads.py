"""Threads of the offloaded update: this rank's share of the cores, and the user's number around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero.api import run_words
from hf_zero.config import ConfigError, resolve
from hf_zero.device.cores import Cores
from hf_zero.device.runtime import Runtime
from hf_zero.optim.elementwise import ElementwiseUpdater
from tests.offload.offload_runs import Run, engine_for, train
from tests.support.late import Late, use
from tests.support.models import AwkwardMLP
from tests.support.ranks import run_each

CPU = {"device": "cpu"}
ON_HOST = {"offload_optimizer": CPU, "sub_group_size": 64}
STREAMED = {"offload_param": CPU, "sub_group_size": 64}


def threads_of(run: Run, rank: int = 0, world: int = 1, cores: Cores | None = None) -> tuple[set[int], set[int], int]:
    """Numbers of threads in updates, in forwards and after training. PyTorch's number is 1, as under torchrun."""
    in_updates, in_forwards = set[int](), set[int]()
    update, forward = ElementwiseUpdater.update_sub_group, AwkwardMLP.forward

    def recorded_update(self: Any, *args: Any, **keywords: Any) -> None:
        in_updates.add(torch.get_num_threads())
        update(self, *args, **keywords)

    def recorded_forward(self: Any, *args: Any, **keywords: Any) -> Any:
        in_forwards.add(torch.get_num_threads())
        return forward(self, *args, **keywords)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            mock.patch.object(ElementwiseUpdater, "update_sub_group", recorded_update),
            mock.patch.object(AwkwardMLP, "forward", recorded_forward),
            mock.patch.object(Cores, "here", lambda: cores or Cores(tuple(range(5)))),
        ):
            engine = engine_for(run, world)
            train(engine, run, rank, world, steps=2)
            found = in_updates, in_forwards, torch.get_num_threads()
            engine.destroy()
    finally:
        torch.set_num_threads(before)
    return found


def keyed(value: object, zero: dict[str, Any] = ON_HOST, stage: int = 2) -> Run:
    return Run(stage, zero, sections={"hf_zero": {"offload_threads": value}})


@pytest.mark.parametrize(
    ("run", "threads"),
    [
        pytest.param(Run(2, ON_HOST), 5, id="stage 2"),
        pytest.param(Run(3, {**ON_HOST, "offload_param": CPU}), 5, id="stage 3"),
        pytest.param(Run(3, STREAMED, sections={"hf_zero": {"streaming": {"enabled": True}}}), 5, id="during backward"),
        pytest.param(keyed(3), 3, id="a number"),
        pytest.param(keyed("unchanged"), 1, id="unchanged"),
        pytest.param(Run(2), 1, id="an update on the device"),
    ],
)
def test_only_the_offloaded_update_takes_the_share(run: Run, threads: int) -> None:
    """A user started ranks by torchrun, which sets OMP_NUM_THREADS to 1. The offloaded update ran on one thread
    per rank and took most of the step, without a word."""
    with use(Late()):
        assert threads_of(run) == ({threads}, {1}, 1)


def test_the_drive(tmp_path: Path) -> None:
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 5}
    with use(Late()):
        assert threads_of(Run(2, {"offload_optimizer": nvme, "sub_group_size": 64})) == ({5}, {1}, 1)


def test_without_an_accelerator_the_users_number_applies_everywhere() -> None:
    with use(Runtime()):
        assert threads_of(Run(2, ON_HOST)) == ({1}, {1}, 1)


def run_threads(rank: int, bound: bool) -> Any:
    cores = Cores((3 * rank, 3 * rank + 1, 3 * rank + 2) if bound else tuple(range(4)))
    with use(Late()):
        return threads_of(Run(1, ON_HOST), rank, 2, cores)


def test_ranks_of_a_host_share_its_cores() -> None:
    shared, bound = run_each(run_threads, 2, [(False,), (True,)])
    assert shared == [({2}, {1}, 1)] * 2
    assert bound == [({3}, {1}, 1)] * 2


def test_the_first_log_lines_name_the_number() -> None:
    with use(Late()), mock.patch.object(Cores, "here", lambda: Cores(tuple(range(6)))):
        engine = engine_for(Run(2, ON_HOST), 1)
        assert "updates in host memory: 6 threads of this rank (hf_zero.offload_threads)" in run_words._lines(engine)
        engine.destroy()


@pytest.mark.parametrize("value", [0, -1, 1.5, "all", True])
def test_other_values_are_refused(value: object) -> None:
    config = {"train_batch_size": 1, "hf_zero": {"offload_threads": value}}
    with pytest.raises(ConfigError, match="(?s)hf_zero.offload_threads.*must be a number of threads"):
        resolve(config, world_size=1)
