"""`python -m hf_zero.launch.task JOB`: what mpirun and srun run once per rank; its rank comes from their variables."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from hf_zero.launch import LaunchError
from hf_zero.launch.job import Job, RankCommand
from hf_zero.launch.node import enter
from hf_zero.launch.ranks import report_to_launcher, run_commands
from hf_zero.rank_environment import RankEnvironment, find_rank_environment


def main(words: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if words is None else list(words)
    host = socket.gethostname()
    try:
        if len(arguments) != 1:
            raise LaunchError("this program is started by mpirun or srun, through hf-zero launch")
        job = Job.decode(arguments[0])
        command = rank_command(job, find_rank_environment(os.environ))
        enter(job.folder, host)
        return run_commands(job, host, [command], report=report_to_launcher(job.token))
    except (LaunchError, ValueError) as error:
        sys.stderr.write(f"hf-zero launch on {host}: {error}\n")
        return 2


def rank_command(job: Job, given: RankEnvironment | None) -> RankCommand:
    """The process for the rank environment that MPI or Slurm has given.

    Raises:
        LaunchError: when it has placed its processes otherwise than asked, so that ranks would share devices.
    """
    if given is None:
        raise LaunchError("neither mpirun nor srun has said which rank this is: no OMPI_*, PMI_* or SLURM_* variables")
    if given.world_size != job.world.num_ranks:
        raise LaunchError(f"{given.source} has started {given.world_size} processes instead of {job.world.num_ranks}")
    place = list(job.world.places())[given.rank]
    if given.local_rank != place.local_rank:
        raise LaunchError(
            f"{given.source} has put rank {given.rank} in place {given.local_rank} of its host, where place "
            f"{place.local_rank} of {job.world.names[place.node_rank]} was asked for: leave placement to hf-zero launch"
        )
    return job.of_rank(given.rank, given.first_host)


if __name__ == "__main__":
    sys.exit(main())
