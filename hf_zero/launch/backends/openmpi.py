"""Open MPI's mpirun, which only starts the ranks: what they say to each other does not go through MPI."""

from __future__ import annotations

from collections.abc import Sequence

from hf_zero.launch.backends.base import (
    Backend,
    Command,
    Request,
    launcher_environment,
    python_variables,
    task_words,
)
from hf_zero.launch.job import Job


class OpenMpi(Backend):
    name = "openmpi"
    programs = (("mpirun.openmpi", "mpirun"), ("ompi_info",))
    package = "openmpi-bin"

    def command(self, job: Job, request: Request, programs: Sequence[str]) -> Command:
        hosts = ",".join(f"{node.name}:{len(node.slots)}" for node in job.world.nodes)
        words = [programs[0], "-n", str(job.world.num_ranks), "--host", hosts]
        # Ranks in the order of hosts, and their threads on all cores: bound to one core each they would crawl.
        words += ["--map-by", "slot", "--bind-to", "none"]
        if request.ssh_port is not None:
            words += ["--mca", "plm_rsh_args", f"-p {request.ssh_port}"]
        words += request.launcher_args
        for name, value in sorted(python_variables(job).items()):
            words += ["-x", f"{name}={value}"]
        return Command([*words, *task_words(job)], launcher_environment())
