"""What starts `launch.ranks` once per rank: mpirun of Open MPI, of MPICH, Intel and MVAPICH (all Hydra), and srun.

They only start the ranks: what these say to each other does not go through MPI.

pdsh: one ssh per host, each of which starts that host's ranks.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from hf_zero.launch import LaunchError
from hf_zero.launch.backends.base import Backend, Command, Request, launcher_environment, python_variables, task_words
from hf_zero.launch.job import Job

_FAN_OUT = "1024"


class Pdsh(Backend):
    name = "pdsh"
    programs = (("pdsh",), ("ssh",))
    package = "pdsh"

    def command(self, job: Job, request: Request, programs: Sequence[str]) -> Command:
        environment = {**launcher_environment(), "PDSH_RCMD_TYPE": "ssh"}
        if request.ssh_port is not None:
            appended = environment.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{appended} -p {request.ssh_port}".strip()
        hosts = ",".join(job.world.names)
        words = [programs[0], "-S", "-f", _FAN_OUT, *request.launcher_args, "-w", hosts, remote_command(job, request)]
        # pdsh leaves its ssh processes alone when it ends, and with them the ranks.
        return Command(words, environment, ends_children=True)


def remote_command(job: Job, request: Request) -> str:
    """What the shell of a remote host reads. All but Python's own variables travels inside the job."""
    variables = [f"{name}={value}" for name, value in sorted(python_variables(job).items())]
    start = ["env", *variables] if variables else []
    words = [*start, sys.executable, "-u", "-m", "hf_zero.launch.ranks", job.encode(), "--host"]
    command = "exec " + shlex.join(words)
    if request.venv_script is not None:
        command = f". {shlex.quote(request.venv_script)} && {command}"
    # pdsh reads % itself: %h becomes the host, as we have named it.
    return command.replace("%", "%%") + " %h"


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


class Mpich(Backend):
    name = "mpich"
    programs: tuple[tuple[str, ...], ...] = (("mpirun.mpich", "mpiexec.hydra", "mpirun"),)
    package = "mpich"
    refuses = {"ssh_port": "Hydra passes no port to ssh: write it into ~/.ssh/config"}

    def command(self, job: Job, request: Request, programs: Sequence[str]) -> Command:
        words = [programs[0], *self.placement(job), *request.launcher_args]
        for name, value in sorted({**python_variables(job), **self.variables()}.items()):
            words += ["-genv", name, value]
        return Command([*words, *task_words(job)], launcher_environment())

    def placement(self, job: Job) -> list[str]:
        """Hosts, each with its number of ranks."""
        hosts = ",".join(f"{node.name}:{len(node.slots)}" for node in job.world.nodes)
        return ["-n", str(job.world.num_ranks), "-hosts", hosts]

    def variables(self) -> dict[str, str]:
        """What this MPI itself wants to be told."""
        return {}


class IntelMpi(Mpich):
    name = "impi"
    programs = (("mpirun",),)
    package = "intel-oneapi-mpi"

    def placement(self, job: Job) -> list[str]:
        return even_placement(job, self.name)

    def variables(self) -> dict[str, str]:
        return {"I_MPI_PIN": "0"}  # the cores of a rank are ours to choose


class Mvapich(Mpich):
    name = "mvapich"
    programs = (("mpirun",), ("mpiname",))
    package = "mvapich2"

    def placement(self, job: Job) -> list[str]:
        return even_placement(job, self.name)

    def variables(self) -> dict[str, str]:
        """DeepSpeed's, without those that tune MPI's collectives, which are not used here."""
        return {"MV2_DEBUG_SHOW_BACKTRACE": "1", "MV2_ENABLE_AFFINITY": "0", "MV2_SUPPORT_DL": "1"}


def even_placement(job: Job, name: str) -> list[str]:
    """For those that take one number of ranks for all hosts."""
    per_node = job.world.slots_per_node()
    if per_node is None:
        counts = ", ".join(f"{node.name}: {len(node.slots)}" for node in job.world.nodes[:8])
        raise LaunchError(
            f"--launcher {name} needs as many slots on every host ({counts}): narrow them with --num_gpus"
        )
    return ["-n", str(job.world.num_ranks), "-ppn", str(per_node), "-hosts", ",".join(job.world.names)]


class Slurm(Backend):
    """srun, inside an allocation or making one: it chooses the hosts unless the job names them."""

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
