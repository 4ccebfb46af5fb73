"""Ranks started by MPI find each other through MPI's environment variables alone."""

from __future__ import annotations

import os

import pytest
import torch

import hf_zero
from tests.support.ranks import free_port, run_ranks

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
