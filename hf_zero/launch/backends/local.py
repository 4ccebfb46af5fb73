"""Ranks on this machine: all of a job with one host, or this host's part of one that is started by hand on each."""

from __future__ import annotations

from collections.abc import Sequence

from hf_zero.launch.backends.base import Backend, Command, Request, own_node_rank
from hf_zero.launch.errors import LaunchError
from hf_zero.launch.job import Job
from hf_zero.launch.ranks import report_to_user, run_node


class NoSsh(Backend):
    """`--no_ssh --node_rank R`: the same command on every host, with another R."""

    name = "nossh"
    is_remote = False

    def run(self, job: Job, request: Request) -> int:
        return run_node(job, own_node_rank(job, request, "--no_ssh"), report=report_to_user)

    def command(self, job: Job, request: Request, programs: Sequence[str]) -> Command:
        raise NotImplementedError("ranks on this host are started without another program")


class Local(NoSsh):
    """All ranks here."""

    name = "local"

    def run(self, job: Job, request: Request) -> int:
        if len(job.world.nodes) > 1:
            raise LaunchError(
                f"--launcher local starts ranks on this machine only, and the job has {len(job.world.nodes)} hosts: "
                "choose another launcher, or narrow it with --num_nodes 1"
            )
        return run_node(job, 0, report=report_to_user)
