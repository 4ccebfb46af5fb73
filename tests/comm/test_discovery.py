"""Ranks that an MPI has started find each other by its variables alone; nobody else has said who they are."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

SCRIPT = """
import os, torch, hf_zero
hf_zero.init_distributed("gloo", distributed_port=int(os.environ["PORT"]))
value = torch.ones(1) * (1 + torch.distributed.get_rank())
torch.distributed.all_reduce(value)
print(value.item(), os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])
"""
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SAID_BY_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize("names", [OPEN_MPI, HYDRA], ids=["openmpi", "hydra"])
def test_ranks_of_an_mpi(names: tuple[str, ...]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {name: value for name, value in os.environ.items() if name not in SAID_BY_LAUNCHERS}
    ranks = []
    for rank in range(2):
        said = dict(zip(names, (str(rank), "2", str(rank), "2")))
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT],
                env={**environment, **said, "PORT": port},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        said_by_ranks = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert said_by_ranks == [["3.0", "0", "0", "2"], ["3.0", "1", "1", "2"]]
