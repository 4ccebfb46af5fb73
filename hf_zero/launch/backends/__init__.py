"""The ways to start ranks; `BACKENDS` has them by the name that `--launcher` takes."""

from __future__ import annotations

from hf_zero.launch.backends.base import Backend, Command
from hf_zero.launch.backends.remote import IntelMpi, Mpich, Mvapich, OpenMpi, Pdsh, Slurm
from hf_zero.launch.backends.this_host import Local, NoSsh, Standard, Torchrun

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
