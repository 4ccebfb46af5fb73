"""Finds the rank of a process in the variables set by torchrun, MPI or Slurm."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

LOCAL_ADDRESS = "127.0.0.1"


@dataclass(frozen=True)
class RankEnvironment:
    """A process's rank among those started by one launcher.

    Attributes:
        source: the launcher that set the variables.
        first_host: a name of rank 0's host; None if the launcher does not provide it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    source: str
    first_host: str | None = None

    def variables(self) -> dict[str, str]:
        """Return torchrun's variables for this rank."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
        }


# rank, world, local rank, local world. Slurm comes last: srun may have started the mpirun that set the others.
_MPI = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MVAPICH": tuple(f"MV2_COMM_WORLD_{part}" for part in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


def find_rank_environment(environment: Mapping[str, str]) -> RankEnvironment | None:
    """Return the rank assigned by mpirun or srun; None without either.

    Raises:
        ValueError: the variables are inconsistent.
    """
    for source, names in _MPI.items():
        if names[0] in environment and names[1] in environment:
            return _checked([_number(environment, name) for name in names], source, names[:2])
    # Only srun sets the step's number of tasks. A batch script also has SLURM_PROCID, but is not a rank.
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        numbers = [_number(environment, name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")]
        per_node = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = _number(environment, "SLURM_NODEID") or 0
        hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        numbers.append(per_node[node] if node < len(per_node) else None)
        return _checked(numbers, "Slurm", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"), first_host(hosts))
    return None


def set_rank_environment(environment: MutableMapping[str, str], port: int) -> None:
    """Set torchrun's variables if only those of MPI or Slurm are set.

    Raises:
        ValueError: rank 0's address is not known.
    """
    if environment.get("RANK") or environment.get("WORLD_SIZE"):
        return
    rank_env = find_rank_environment(environment)
    if rank_env is None or rank_env.world_size == 1:
        return
    if not environment.get("MASTER_ADDR"):
        is_one_host = rank_env.local_world_size == rank_env.world_size
        address = LOCAL_ADDRESS if is_one_host else rank_env.first_host
        if address is None:
            raise ValueError(
                f"{rank_env.source} started {rank_env.world_size} ranks on several hosts, and MASTER_ADDR does not say "
                "where rank 0 is: export MASTER_ADDR (and MASTER_PORT), or start with `hf-zero launch`, which does"
            )
        environment["MASTER_ADDR"] = address
    if not environment.get("MASTER_PORT"):
        environment["MASTER_PORT"] = str(port)
    environment.update(rank_env.variables())


def first_host(hosts: str) -> str | None:
    """Return the first name of a Slurm host list: `gpu[07-09,12],login1` -> `gpu07`."""
    match = re.match(r"([\w.-]+)(?:\[(\d+)[\d,-]*\]([\w.-]*))?", hosts)
    return None if match is None else "".join(part or "" for part in match.groups())


def tasks_per_node(words: str) -> list[int]:
    """Expand Slurm's short form: `2(x3),1` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for tasks, _, repeated in re.findall(r"(\d{1,6})(\(x(\d{1,6})\))?", words):
        counts += [int(tasks)] * int(repeated or 1)
    return counts


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError(f"{name}={text!r} should be a whole number; check which launcher or script sets it")
    return int(text)


def _checked(
    numbers: list[int | None], source: str, names: tuple[str, ...], first_host: str | None = None
) -> RankEnvironment | None:
    rank, world, local_rank, local_world = numbers
    if rank is None or world is None:
        return None
    if rank >= world:
        raise ValueError(f"{names[0]}={rank} and {names[1]}={world} contradict one another: ranks are below the size")
    if local_rank is None or local_world is None:
        local_rank, local_world = rank, world  # old launchers do not set them, and only support one host
    return RankEnvironment(rank, world, local_rank, local_world, source, first_host)
