"""The ways to start ranks; `BACKENDS` has them by the name that `--launcher` takes."""

from __future__ import annotations

from hf_zero.launch.backends.base import Backend, Command
from hf_zero.launch.backends.local import Local, NoSsh
from hf_zero.launch.backends.mpi import IntelMpi, Mpich, Mvapich, OpenMpi
from hf_zero.launch.backends.pdsh import Pdsh
from hf_zero.launch.backends.slurm import Slurm
from hf_zero.launch.backends.torchrun import Standard, Torchrun

BACKENDS: dict[str, type[Backend]] = {
    "pdsh": Pdsh,
    "openmpi": OpenMpi,
    "mpich": Mpich,
    "impi": IntelMpi,
    "mvapich": Mvapich,
    "slurm": Slurm,
    "torchrun": Torchrun,
    "standard": Standard,
    "nossh": NoSsh,
    "local": Local,
}

__all__ = ["BACKENDS", "Backend", "Command"]
