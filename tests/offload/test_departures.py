"""Copies of gradients to host memory: added on demand, in order, and only a few in flight."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.offload.placement import MAX_DEPARTURES, Departures, StagingPool
from tests.support.late import Late


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
