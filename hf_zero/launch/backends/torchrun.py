"""torchrun on this host: alone, or as this host's part of a job that is started on each (elastic ones too)."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hf_zero.launch.backends.base import Backend, Command, Request, launcher_environment, own_node_rank
from hf_zero.launch.job import Job
from hf_zero.launch.world import VISIBLE_DEVICES


class Torchrun(Backend):
    """What stands in --launcher_args comes last and wins: `--nnodes 1:4 --max-restarts 3 --rdzv-endpoint host`."""

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
