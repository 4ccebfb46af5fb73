"""Starts ranks on this host, for the launcher itself, and as a program on the hosts of a job.

python -m hf_zero.launch.ranks JOB --host NAME     all ranks of this host: what pdsh runs, once per host
python -m hf_zero.launch.ranks JOB                 one rank, found in the variables of mpirun or srun
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_zero.launch import LaunchError, shown
from hf_zero.launch.children import Failure
from hf_zero.launch.job import Job, RankCommand
from hf_zero.launch.supervise import Supervisor
from hf_zero.network import name_gloo_interface
from hf_zero.rank_environment import RankEnvironment, find_rank_environment


def run_node(job: Job, node_rank: int, *, report: Callable[[Failure], None], is_attached: bool = False) -> int:
    """Run all ranks of one node; the exit status."""
    host = job.world.names[node_rank]
    return run_commands(job, host, job.on_node(node_rank), report=report, is_attached=is_attached)


def run_commands(
    job: Job,
    host: str,
    commands: Sequence[RankCommand],
    *,
    report: Callable[[Failure], None],
    is_attached: bool = False,
) -> int:
    """Run these ranks; the exit status."""
    for command in commands:
        name_gloo_interface(command.environment, [name for name in job.world.names if name != host])
    supervisor = Supervisor(host, log_path=_log_paths(job.log_folder), is_attached=is_attached)
    return supervisor.run(commands, report)


def report_to_launcher(token: str) -> Callable[[Failure], None]:
    """Tell the launcher on another host, which reads what this process prints."""

    def report(failure: Failure) -> None:
        sys.stderr.buffer.write(b"\n" + failure.mark(token))
        sys.stderr.buffer.flush()

    return report


def report_to_user(failure: Failure) -> None:
    sys.stderr.write(failure.message())
    sys.stderr.flush()


def _log_paths(folder: str | None) -> Callable[[int], str | None]:
    """Where each rank's log goes: a name of its own for every launch, as DeepSpeed's launcher has it."""
    if folder is None:
        return lambda rank: None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"--enable_each_rank_log {shown(folder)} is not a writable folder: {error}") from None
    beginning = time.strftime("%Y%m%d%H%M%S")
    return lambda rank: os.path.join(str(folder), f"{beginning}_rank{rank}.log")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hf_zero.launch.ranks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--host", help="this host, as the hostfile names it; without it, mpirun or srun starts each rank"
    )
    parser.add_argument("job", help="the word that hf-zero launch made")
    options = parser.parse_args(words)
    host = options.host or socket.gethostname()
    try:
        job = Job.decode(options.job)
        report = report_to_launcher(job.token)
        if options.host is None:
            command = rank_command(job, find_rank_environment(os.environ))
            _enter(job.folder, host)
            return run_commands(job, host, [command], report=report)
        if host not in job.world.names:
            raise LaunchError(f"{shown(host)} is not a host of this job, which has {', '.join(job.world.names)}")
        _enter(job.folder, host)
        return run_node(job, job.world.names.index(host), report=report, is_attached=True)
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


def _enter(folder: str, host: str) -> None:
    """Change into the folder that the job was started from."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise LaunchError(
            f"the job was started in {shown(folder)}, which cannot be used on {host}: {error.strerror}. Put it on "
            "a file system that the hosts share, or start from a folder that exists on all of them"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
