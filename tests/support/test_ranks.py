"""Tests of `run_ranks`: values are returned, failures are reported, nothing hangs, no process is left behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailure, rendezvous_url, run_each, run_ranks


def run_sum(rank: int, values: list[float]) -> tuple[int, float]:
    total = torch.tensor(values[rank])
    dist.all_reduce(total)
    return os.getpid(), float(total)


def run_fail_on_one(rank: int) -> None:
    print(f"hello from {rank}")
    if rank == 1:
        raise ValueError("a fault of rank 1")
    dist.barrier()


def run_hang_on_one(rank: int) -> None:
    if rank == 0:
        time.sleep(60)


def run_vanish(rank: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.barrier()


def run_launcher_variables(rank: int) -> tuple[str, str, str, bool]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    return *(os.environ[name] for name in names), dist.is_initialized()  # type: ignore[return-value]


def run_own_group(rank: int) -> int:
    dist.init_process_group("gloo", init_method=rendezvous_url(), rank=rank, world_size=2)
    return dist.get_world_size()


def run_own_group_from_environment(rank: int) -> int:
    dist.init_process_group("gloo")
    return dist.get_world_size()


def run_tensor(rank: int) -> torch.Tensor:
    return torch.full((300_000,), float(rank))


def run_number(rank: int, number: int) -> tuple[int, int, float]:
    if number < 0:
        raise ValueError("a fault of one case")
    return number, os.getpid(), float(torch.rand(()))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_values_return_in_rank_order_and_processes_end(world_size: int) -> None:
    values = [2.0**rank for rank in range(world_size)]
    results = run_ranks(run_sum, world_size, values)
    assert [total for _, total in results] == [sum(values)] * world_size
    assert not any(alive(pid) for pid, _ in results)


def test_cases_run_in_one_start_each_with_the_same_seed() -> None:
    (first, second), (third, fourth) = run_each(run_number, 2, [(1,), (2,)])
    assert (first[0], second[0], third[0], fourth[0]) == (1, 1, 2, 2)
    assert first[1] == third[1] != second[1] and len({found[2] for found in (first, second, third, fourth)}) == 1
    with pytest.raises(RankFailure, match=r"(?s)a fault of one case.*case \(7,\).*case \(-1,\)"):
        run_each(run_number, 2, [(7,), (-1,), (8,)])


def test_the_first_failing_rank_is_shown_with_all_output() -> None:
    with pytest.raises(RankFailure, match="rank 1 of 3 failed first") as caught:
        run_ranks(run_fail_on_one, 3)
    assert caught.value.rank == 1 and caught.value.kind == "ValueError"
    assert "a fault of rank 1" in str(caught.value) and "run_fail_on_one" in str(caught.value)
    assert "[rank 0] hello from 0" in str(caught.value) and "[rank 2] hello from 2" in str(caught.value)


def test_a_hanging_rank_ends_and_shows_where_it_stood() -> None:
    with pytest.raises(RankFailure, match=r"ranks \[0\] of 2 did not end within 3") as caught:
        run_ranks(run_hang_on_one, 2, timeout_s=3)
    assert caught.value.kind == "Timeout" and "run_hang_on_one" in str(caught.value)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankFailure, match="ended without a word") as caught:
        run_ranks(run_vanish, 2)
    assert (caught.value.rank, caught.value.kind) == (0, "Died")


def test_ranks_see_the_launchers_variables_and_may_make_their_own_group() -> None:
    assert run_ranks(run_launcher_variables, 2, init=False) == [("0", "0", "2", False), ("1", "1", "2", False)]
    assert run_ranks(run_own_group, 2, init=False) == [2, 2]
    assert run_ranks(run_own_group_from_environment, 2, init=False) == [2, 2]


def test_tensors_travel_by_value() -> None:
    results = run_ranks(run_tensor, 2)
    assert [float(result.mean()) for result in results] == [0.0, 1.0]
