"""Copies of gradients to host memory: added on demand, in order, and only a few in flight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero.offload.placement import MAX_DEPARTURES, Departures, StagingPool
from tests.offload.offload_runs import Run, engine_for, train
from tests.support.late import Late, use
from tests.support.ranks import run_each


def departures() -> tuple[Late, Departures]:
    runtime = Late(early=0.0)
    pool = StagingPool(runtime, lambda numel, dtype: torch.empty(numel, dtype=dtype), is_host=True)
    return runtime, Departures(runtime, pool)


def test_what_is_sent_is_counted_in_when_it_is_asked_for() -> None:
    runtime, leaving = departures()
    first, second = list[float](), list[float]()

    def count_first(values: Tensor) -> None:
        first.append(float(values.sum()))

    def count_second(values: Tensor) -> None:
        second.append(float(values.sum()))

    leaving.send(torch.ones(8), count_first)
    leaving.send(torch.ones(8) * 2, count_second)
    leaving.send(torch.ones(8) * 3, count_first)
    assert not first and runtime.num_host_waits == 0, "who sends does not wait"
    leaving.wait(count_second)
    assert (first, second) == ([8.0], [16.0]), "what was sent before it, too"
    leaving.wait()
    assert first == [8.0, 24.0]


def test_only_a_few_are_under_way() -> None:
    runtime, leaving = departures()
    counted: list[float] = []
    for number in range(MAX_DEPARTURES + 2):
        leaving.send(torch.full((4,), float(number)), lambda values: counted.append(float(values[0])))
    assert counted == [0.0, 1.0] and runtime.num_host_waits == 2


def test_gradients_may_arrive_where_they_stay() -> None:
    _, leaving = departures()
    place = torch.zeros(4)
    leaving.send(torch.ones(4), lambda values: None, place)
    leaving.wait()
    assert place.eq(1).all()


def norms_of_replicas(rank: int, offload: dict[str, Any]) -> list[float]:
    with use(Late()):
        run = Run(3, {"mics_shard_size": 1, **offload}, bf16=False, clip=0.05, steps=2)
        engine = engine_for(run, 2)
        numbers = train(engine, run, rank, 2)
        engine.destroy()
    return numbers


def test_the_norm_is_of_the_sums_over_replicas(tmp_path: Path) -> None:
    """With states on a drive and several copies of them, an accelerator's norm was that of one copy's gradients: they
    were still on their way when the sum over copies began, and their arrival noted their squares."""
    nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 5}}
    [on_drive, _], [expected, _] = run_each(norms_of_replicas, 2, [(nvme,), ({},)])
    assert on_drive == pytest.approx(expected, rel=1e-6)
