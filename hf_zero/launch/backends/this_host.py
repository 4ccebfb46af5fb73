"""Ranks on this host, by us or by torchrun: all of a job, or this host's part of one that is started on each.

With torchrun it may be an elastic job, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from hf_zero.config.extras import service
from hf_zero.launch import LaunchError
from hf_zero.launch.backends.base import Backend, Command, Request, launcher_environment, own_node_rank
from hf_zero.launch.children import start
from hf_zero.launch.job import Job
from hf_zero.launch.ranks import report_to_user, run_node
from hf_zero.launch.restarts import TOKEN, Restarts
from hf_zero.launch.world import VISIBLE_DEVICES


class Torchrun(Backend):
    """--launcher_args come last and win: `--nnodes 1:4 --max-restarts 3 --rdzv-endpoint host`."""

    name = "torchrun"
    is_remote = False
    refuses = {
        "bind_cores_to_rank": "torchrun starts the ranks: it has --numa-binding, for --launcher_args",
        "bind_core_list": "torchrun starts the ranks: it has --numa-binding, for --launcher_args",
        "venv_script": "torchrun runs in the environment that is active here",
        "ssh_port": "torchrun uses no ssh",
    }

    def command(self, job: Job, request: Request, programs: Sequence[str]) -> Command:
        nodes = job.world.nodes
        node_rank = 0 if len(nodes) == 1 else own_node_rank(job, request, f"--launcher {self.name}")
        node = nodes[node_rank]
        words = [sys.executable, "-m", "torch.distributed.run"]
        words += [f"--nnodes={len(nodes)}", f"--nproc-per-node={len(node.slots)}", f"--node-rank={node_rank}"]
        words += [f"--master-addr={job.master_addr}", f"--master-port={job.master_port}"]
        if job.log_folder is not None:
            words += [f"--log-dir={job.log_folder}", "--redirects=3"]
        words += request.launcher_args
        if job.program.without_python:
            words += ["--no-python"]
        elif job.program.is_module:
            words += ["--module"]
        environment = {**launcher_environment(), **(job.variables or {})}
        environment[VISIBLE_DEVICES] = ",".join(node.slots)
        return Command([*words, job.program.script, *job.program.arguments], environment)


class Standard(Torchrun):
    """Accelerate's name for it."""

    name = "standard"


class NoSsh(Backend):
    """`--no_ssh --node_rank R`: the same command on every host, with another R."""

    name = "nossh"
    is_remote = False

    def run(self, job: Job, request: Request) -> int:
        node_rank = None if request.is_spare else own_node_rank(job, request, "--no_ssh")
        restarts = None
        if request.max_restarts:
            token, names = os.environ.get(TOKEN, ""), job.world.names
            if not token:
                raise LaunchError(
                    f"--max_restarts on several hosts needs {TOKEN}, the same on all of them and known to nobody else: "
                    "random words, such as those of `openssl rand -hex 16`"
                )
            peers = None
            if len(names) > 1:
                peers = service("peers")(names, node_rank, job.master_addr, job.master_port, token)
            restarts = Restarts(request.max_restarts, request.stopped_s, start, peers)
            if node_rank is None:
                restarts.prepare(job.on_node(0)[0])
                node_rank = None if peers is None else peers.await_place()
            if node_rank is None:  # the job has ended without it
                restarts.close()
                return 0
        assert node_rank is not None, "a spare has restarts"
        return run_node(job, node_rank, report=report_to_user, restarts=restarts)

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
        restarts = (
            Restarts(request.max_restarts, request.stopped_s, start, stands_by=request.stands_by)
            if request.max_restarts
            else None
        )
        return run_node(job, 0, report=report_to_user, restarts=restarts)
