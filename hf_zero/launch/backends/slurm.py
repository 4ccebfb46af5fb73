"""Slurm's srun, inside an allocation or making one: it chooses the hosts unless the job names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hf_zero.launch.backends.base import Backend, Command, Request, launcher_environment, python_variables, task_words
from hf_zero.launch.errors import LaunchError
from hf_zero.launch.job import Job


class Slurm(Backend):
    name = "slurm"
    programs = (("srun",),)
    package = "slurm-client"
    refuses = {"ssh_port": "srun uses no ssh", "force_multi": "srun is used for one node as well"}

    def command(self, job: Job, request: Request, programs: Sequence[str]) -> Command:
        per_node = job.world.slots_per_node()
        if per_node is None:
            raise LaunchError("--launcher slurm starts as many ranks on every node: narrow the slots with --num_gpus")
        for node in job.world.nodes:
            if node.slots != tuple(str(slot) for slot in range(per_node)):
                raise LaunchError(
                    f"--launcher slurm chooses no devices ({node.name}:{','.join(node.slots)}): Slurm hands them out. "
                    "Name whole hosts in --include and --exclude, and a number in --num_gpus"
                )
        nodes = len(job.world.nodes)
        words = [programs[0], "--nodes", str(nodes), "--ntasks", str(job.world.num_ranks)]
        words += ["--ntasks-per-node", str(per_node), "--kill-on-bad-exit=1"]
        if request.has_hosts:
            words += ["--nodelist", ",".join(job.world.names)]
        # srun hands its whole environment to the tasks, so that nothing has to be quoted.
        environment = {**launcher_environment(), **python_variables(job)}
        return Command([*words, *request.launcher_args, *task_words(replace(job, gives_devices=False))], environment)
