"""Starts ranks on this host, for the launcher itself and for the programs that it starts on other hosts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_zero.launch import LaunchError, shown
from hf_zero.launch.failure import Failure
from hf_zero.launch.job import Job, RankCommand
from hf_zero.launch.supervise import Supervisor
from hf_zero.network import name_gloo_interface


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
        raise LaunchError(f"--enable_each_rank_log {shown(folder)} is no folder that can be written: {error}") from None
    beginning = time.strftime("%Y%m%d%H%M%S")
    return lambda rank: os.path.join(str(folder), f"{beginning}_rank{rank}.log")
