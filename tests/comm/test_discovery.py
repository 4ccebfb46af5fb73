"""How ranks join: through MPI's environment variables alone, or by the program itself; their devices and timeouts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero import network
from hf_zero.comm import background_collectives, init_distributed, process_group
from hf_zero.comm.process_group import common_timeout, get_local_rank, local_device
from hf_zero.device import kinds
from tests.support.ranks import free_port, run_each, run_ranks

OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SAID_BY_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_discovered(rank: int, names: tuple[str, ...], port: int) -> tuple[float, str, str, str]:
    for name in SAID_BY_LAUNCHERS:
        os.environ.pop(name, None)
    os.environ.update(dict(zip(names, (str(rank), "2", str(rank), "2"), strict=True)))
    hf_zero.init_distributed("gloo", distributed_port=port)
    value = torch.ones(1) * (1 + rank)
    torch.distributed.all_reduce(value)
    return value.item(), os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]


@pytest.mark.parametrize("names", [OPEN_MPI, HYDRA], ids=["openmpi", "hydra"])
def test_ranks_of_an_mpi(names: tuple[str, ...]) -> None:
    found = run_ranks(run_discovered, 2, names, free_port(), init=False)
    assert found == [(3.0, "0", "0", "2"), (3.0, "1", "1", "2")]


class _Gpus:
    """A stand-in for CUDA with `count` visible devices, on which gloo is the backend."""

    def __init__(self, count: int) -> None:
        self.current, self.count = 0, count

    def choose(self, index: int) -> None:
        self.current = index

    def patches(self) -> list[Any]:
        replaced: dict[str, Callable[..., Any]] = {
            "is_available": lambda: True,
            "current_accelerator": lambda: torch.device("cuda"),
            "device_count": lambda: self.count,
            "current_device_index": lambda: self.current,
            "set_device_index": self.choose,
        }
        backends = mock.patch.dict(kinds.BACKENDS, cuda="gloo")
        return [backends, *(mock.patch.object(torch.accelerator, *each, create=True) for each in replaced.items())]


def run_joined_by_program(rank: int, by: str) -> tuple[int, str | None, str | None]:
    """(current device, its name, gloo's interface when the first of our gloo groups is made)."""
    gpus, interfaces, make = _Gpus(2), [], dist.new_group
    for each in gpus.patches():
        each.start()
    mock.patch.object(network, "is_loopback", lambda name: True).start()
    mock.patch.object(network, "_only_interface", lambda: "lo").start()
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # as on two hosts
    os.environ.pop(network.GLOO_INTERFACE, None)

    def observe(*args: Any, **kwargs: Any) -> Any:
        interfaces.append(os.environ.get(network.GLOO_INTERFACE))
        return make(*args, **kwargs)

    mock.patch.object(dist, "new_group", observe).start()
    if by == "initialize":
        with pytest.raises((RuntimeError, AssertionError), match="CUDA|NVIDIA"):  # moving the model there
            hf_zero.initialize(
                model=torch.nn.Linear(2, 2),
                config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
                dist_init_required=False,
            )
    else:
        init_distributed()
        background_collectives()
    return gpus.current, str(local_device()), interfaces[0]


@pytest.mark.parametrize("by", ["init_distributed", "initialize"])
def test_a_group_of_the_program_is_prepared(by: str) -> None:
    """A script called `dist.init_process_group("nccl")` before `hf_zero.initialize`. Its engines were on the device of
    the local rank, but the current device stayed 0, where Triton launches kernels: an illegal address on all other
    ranks. And on hosts whose name resolves to 127.0.1.1, gloo groups of engines did not connect."""
    assert run_ranks(run_joined_by_program, 2, by) == [(0, "cuda:0", "lo"), (1, "cuda:1", "lo")]


def test_one_visible_device_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm (--gpus-per-task) and Ray make a single GPU visible to each process. Local rank 1 asked for cuda:1:
    "invalid device ordinal"."""
    gpus = _Gpus(1)
    for each in gpus.patches():
        each.start()
    try:
        assert [kinds.index_of_rank(local_rank) for local_rank in (0, 1, 7)] == [0, 0, 0]
        gpus.count = 4
        assert [kinds.index_of_rank(local_rank) for local_rank in (0, 3)] == [0, 3]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        with pytest.raises(ValueError, match=r"local rank 4 .* sees 4 of them \(CUDA_VISIBLE_DEVICES=4,5,6,7\).*Start"):
            kinds.index_of_rank(4)
    finally:
        mock.patch.stopall()


def run_under_slurm(rank: int, count: int) -> tuple[int, int, str]:
    """A program that joins itself, under srun."""
    for each in _Gpus(count).patches():
        each.start()
    for name in SAID_BY_LAUNCHERS:
        os.environ.pop(name, None)
    os.environ |= {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": str(rank)}
    os.environ |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": socket.gethostname()}
    init_distributed()
    return get_local_rank(), kinds.current_device("cuda").index, str(local_device())


def test_a_program_under_slurm_needs_no_torchrun_variables() -> None:
    """Without LOCAL_RANK all ranks of a host took its first device."""
    found = run_each(run_under_slurm, 2, [(2,), (1,)])
    assert found == [[(0, 0, "cuda:0"), (1, 1, "cuda:1")], [(0, 0, "cuda:0"), (1, 0, "cuda:0")]]


def run_timeouts(rank: int, given: str | None, asked: float | None) -> tuple[float, float]:
    """(of the group of all ranks, of a group of an engine), in minutes."""
    if given is not None:
        os.environ["DEEPSPEED_TIMEOUT"] = given
    init_distributed("gloo", timeout=None if asked is None else timedelta(minutes=asked))
    side = background_collectives()._group
    of_side: timedelta = side._get_backend(torch.device("cpu")).options._timeout
    torch.distributed.barrier()  # rank 0 has the store, which the other may still need
    return common_timeout() / timedelta(minutes=1), of_side / timedelta(minutes=1)


@pytest.mark.parametrize(
    ("given", "asked", "expected"), [(None, None, 30.0), ("45", None, 45.0), ("45", 2.0, 2.0)], ids=str
)
def test_the_timeout_of_a_group_that_we_join(given: str | None, asked: float | None, expected: float) -> None:
    """DeepSpeed reads DEEPSPEED_TIMEOUT in minutes. It had no effect, and groups of NCCL got torch's ten minutes."""
    assert run_ranks(run_timeouts, 2, given, asked, init=False) == [(expected, expected)] * 2


def test_a_timeout_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", "half an hour")
    with pytest.raises(ValueError, match="DEEPSPEED_TIMEOUT='half an hour' is not a whole number of minutes"):
        process_group._default_timeout()
