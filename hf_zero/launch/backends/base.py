"""What all ways to start ranks have in common."""

from __future__ import annotations

import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hf_zero.launch import LaunchError
from hf_zero.launch.job import Job
from hf_zero.launch.relay import Relay


@dataclass(frozen=True)
class Request:
    """What a backend gets besides the job.

    Attributes:
        has_hosts: a hostfile was given, so `world` names other machines.
        launcher_args: the words of `--launcher_args`.
    """

    has_hosts: bool = False
    launcher_args: Sequence[str] = ()
    node_rank: int = -1
    ssh_port: int | None = None
    venv_script: str | None = None


@dataclass(frozen=True)
class Command:
    """A program that starts the ranks.

    Attributes:
        words: its argument vector; no shell reads it here.
        environment: all of its variables.
        ends_children: see `Relay`.
    """

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_children: bool = False


class Backend(ABC):
    """A way to start the ranks of a job."""

    name: str
    programs: tuple[tuple[str, ...], ...] = ()  # of each, the first that is installed is used
    package: str = ""
    is_remote = True  # starts ranks on other hosts itself
    refuses: Mapping[str, str] = {}  # options that it does not support, and why

    def find_programs(self) -> list[str]:
        """Paths of what it runs.

        Raises:
            LaunchError: when something is not installed.
        """
        found = [next(filter(None, map(shutil.which, names)), None) for names in self.programs]
        for path, names in zip(found, self.programs):
            if path is None:
                raise LaunchError(
                    f"--launcher {self.name} needs {' or '.join(names)}, which is not installed here (try the package "
                    f"{self.package}), or another launcher"
                )
        return [str(path) for path in found]

    @abstractmethod
    def command(self, job: Job, request: Request, programs: Sequence[str]) -> Command:
        """The program that starts the ranks. Pure: looks nothing up."""

    def run(self, job: Job, request: Request) -> int:
        """Start the ranks and wait for them; the exit status for a shell."""
        command = self.command(job, request, self.find_programs())
        return Relay(job.token, ends_children=command.ends_children).run(command.words, command.environment)


def own_node_rank(job: Job, request: Request, options: str) -> int:
    """Which host of the job this one is, for backends that start the ranks of one host; `options` names the backend.

    Raises:
        LaunchError: it has not been given.
    """
    last = len(job.world.nodes) - 1
    if not 0 <= request.node_rank <= last:
        raise LaunchError(
            f"{options} starts the ranks of one host: --node_rank {request.node_rank} must say which, from 0 to {last} "
            "in the order of the hostfile"
        )
    return request.node_rank


def task_words(job: Job) -> list[str]:
    """What mpirun and srun start once for every rank."""
    return [sys.executable, "-u", "-m", "hf_zero.launch.ranks", job.encode()]


def python_variables(job: Job) -> dict[str, str]:
    """What Python must know before it can read the job."""
    names = ("PYTHON", "HF_ZERO")
    return {name: value for name, value in (job.variables or {}).items() if name.startswith(names)}


def launcher_environment() -> dict[str, str]:
    """Our own variables, for a program that passes on only what it is asked to."""
    return dict(os.environ)
