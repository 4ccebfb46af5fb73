"""Launcher backends; `BACKENDS` maps the names that `--launcher` accepts to them.

pdsh runs one ssh per host, each of which starts that host's ranks. srun and mpirun (of Open MPI, or of MPICH, Intel MPI
and MVAPICH, which use Hydra) start `launch.ranks` once per rank. MPI only starts the ranks; they do not communicate
through it. Local backends start the ranks of this host, which are the whole job or one host's part of it, directly or
with torchrun, which also supports elastic jobs.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hf_zero.launch import LaunchError, extra_service
from hf_zero.launch.job import Job, RankCommand
from hf_zero.launch.ranks import run_ranks
from hf_zero.launch.relay import Backend, BackendOptions, own_node_rank, program, python_variables, task_words
from hf_zero.launch.world import VISIBLE_DEVICES

_FAN_OUT = "1024"


class Pdsh(Backend):
    name = "pdsh"
    programs = (("pdsh",), ("ssh",))
    package = "pdsh"
    ends_children = True  # when pdsh exits, it leaves its ssh processes and their ranks running

    def command(self, job: Job, request: BackendOptions, programs: Sequence[str]) -> RankCommand:
        environment = {"PDSH_RCMD_TYPE": "ssh"}
        if request.ssh_port is not None:
            appended = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
            environment["PDSH_SSH_ARGS_APPEND"] = f"{appended} -p {request.ssh_port}".strip()
        hosts = ",".join(job.world.names)
        words = [programs[0], "-S", "-f", _FAN_OUT, *request.launcher_args, "-w", hosts, remote_command(job, request)]
        return program(words, environment)


def remote_command(job: Job, request: BackendOptions) -> str:
    """The command line for a remote host's shell. The encoded job contains all variables except Python's own."""
    variables = [f"{name}={value}" for name, value in sorted(python_variables(job).items())]
    start = ["env", *variables] if variables else []
    words = [*start, sys.executable, "-u", "-m", "hf_zero.launch.ranks", job.encode(), "--host"]
    command = "exec " + shlex.join(words)
    if request.venv_script is not None:
        command = f". {shlex.quote(request.venv_script)} && {command}"
    # pdsh interprets %: it replaces %h by the host name given with -w.
    return command.replace("%", "%%") + " %h"


class OpenMpi(Backend):
    name = "openmpi"
    programs = (("mpirun.openmpi", "mpirun"), ("ompi_info",))
    package = "openmpi-bin"

    def command(self, job: Job, request: BackendOptions, programs: Sequence[str]) -> RankCommand:
        hosts = ",".join(f"{node.name}:{len(node.slots)}" for node in job.world.nodes)
        words = [programs[0], "-n", str(job.world.num_ranks), "--host", hosts]
        # Assign ranks in host order, and do not bind them: with one core per rank, their threads would be very slow.
        words += ["--map-by", "slot", "--bind-to", "none"]
        if request.ssh_port is not None:
            words += ["--mca", "plm_rsh_args", f"-p {request.ssh_port}"]
        words += request.launcher_args
        for name, value in sorted(python_variables(job).items()):
            words += ["-x", f"{name}={value}"]
        return program([*words, *task_words(job)])


class Mpich(Backend):
    name = "mpich"
    programs: tuple[tuple[str, ...], ...] = (("mpirun.mpich", "mpiexec.hydra", "mpirun"),)
    package = "mpich"
    refuses = {"ssh_port": "Hydra passes no port to ssh: set it in ~/.ssh/config"}
    own_variables: Mapping[str, str] = {}  # environment variables that configure this MPI
    only_even = False  # whether it accepts only one number of ranks for all hosts

    def command(self, job: Job, request: BackendOptions, programs: Sequence[str]) -> RankCommand:
        words = [programs[0], "-n", str(job.world.num_ranks), *self._placement(job), *request.launcher_args]
        for name, value in sorted({**python_variables(job), **self.own_variables}.items()):
            words += ["-genv", name, value]
        return program([*words, *task_words(job)])

    def _placement(self, job: Job) -> list[str]:
        """The arguments that name the hosts and the number of ranks on each."""
        if not self.only_even:
            return ["-hosts", ",".join(f"{node.name}:{len(node.slots)}" for node in job.world.nodes)]
        per_node = job.world.slots_per_node()
        if per_node is None:
            counts = ", ".join(f"{node.name}: {len(node.slots)}" for node in job.world.nodes[:8])
            raise LaunchError(
                f"--launcher {self.name} needs the same number of slots on every host ({counts}): limit them with "
                "--num_gpus"
            )
        return ["-ppn", str(per_node), "-hosts", ",".join(job.world.names)]


class IntelMpi(Mpich):
    name = "impi"
    programs = (("mpirun",),)
    package = "intel-oneapi-mpi"
    own_variables = {"I_MPI_PIN": "0"}  # the launcher binds ranks to cores itself
    only_even = True


class Mvapich(Mpich):
    name = "mvapich"
    programs = (("mpirun",), ("mpiname",))
    package = "mvapich2"
    # DeepSpeed's variables, without those for MPI collectives, which ranks do not use.
    own_variables = {"MV2_DEBUG_SHOW_BACKTRACE": "1", "MV2_ENABLE_AFFINITY": "0", "MV2_SUPPORT_DL": "1"}
    only_even = True


class Slurm(Backend):
    """srun, within an allocation or creating one. Slurm chooses the hosts unless the job names them."""

    name = "slurm"
    programs = (("srun",),)
    package = "slurm-client"
    refuses = {"ssh_port": "srun uses no ssh", "force_multi": "srun is also used for a single node"}

    def command(self, job: Job, request: BackendOptions, programs: Sequence[str]) -> RankCommand:
        per_node = job.world.slots_per_node()
        if per_node is None:
            raise LaunchError("--launcher slurm needs the same number of slots on every node: limit it with --num_gpus")
        for node in job.world.nodes:
            if node.slots != tuple(str(slot) for slot in range(per_node)):
                raise LaunchError(
                    f"--launcher slurm cannot select devices ({node.name}:{','.join(node.slots)}): Slurm assigns them. "
                    "Give whole hosts in --include and --exclude, and a number in --num_gpus"
                )
        nodes = len(job.world.nodes)
        words = [programs[0], "--nodes", str(nodes), "--ntasks", str(job.world.num_ranks)]
        words += ["--ntasks-per-node", str(per_node), "--kill-on-bad-exit=1"]
        if request.has_hosts:
            words += ["--nodelist", ",".join(job.world.names)]
        # srun passes its whole environment to the tasks, so that no variable has to be quoted.
        tasks = task_words(replace(job, gives_devices=False))
        return program([*words, *request.launcher_args, *tasks], python_variables(job))


class Torchrun(Backend):
    """torchrun. --launcher_args come last and take precedence: `--nnodes 1:4 --max-restarts 3 --rdzv-endpoint host`."""

    name = "torchrun"
    is_remote = False
    refuses = {
        "bind_cores_to_rank": "torchrun starts the ranks: it has --numa-binding, for --launcher_args",
        "bind_core_list": "torchrun starts the ranks: it has --numa-binding, for --launcher_args",
        "venv_script": "torchrun runs in the environment that is active here",
        "ssh_port": "torchrun uses no ssh",
    }

    def command(self, job: Job, request: BackendOptions, programs: Sequence[str]) -> RankCommand:
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
        environment = {**(job.variables or {}), VISIBLE_DEVICES: ",".join(node.slots)}
        return program([*words, job.program.script, *job.program.arguments], environment)


class Standard(Torchrun):
    """torchrun under Accelerate's name for it."""

    name = "standard"


class NoSsh(Backend):
    """`--no_ssh --node_rank R`: the user runs the command on every host, each with its own R."""

    name = "nossh"
    is_remote = False

    def run(self, job: Job, request: BackendOptions) -> int:
        node_rank = None if request.is_spare else own_node_rank(job, request, "--no_ssh")
        return run_node(job, node_rank, request)


class Local(Backend):
    """All ranks on this machine."""

    name = "local"
    is_remote = False

    def run(self, job: Job, request: BackendOptions) -> int:
        if len(job.world.nodes) > 1:
            raise LaunchError(
                f"--launcher local starts ranks on this machine only, and the job has {len(job.world.nodes)} hosts: "
                "choose another launcher, or limit it with --num_nodes 1"
            )
        return run_node(job, 0, request)


def run_node(job: Job, node_rank: int | None, request: BackendOptions) -> int:
    """Run the ranks of this host; returns the exit status for a shell. `node_rank`: None for a spare."""
    if request.max_restarts:
        status: int = extra_service("restarts")(job, node_rank, request)
        return status
    assert node_rank is not None, "a spare needs --max_restarts"
    return run_ranks(job, job.world.names[node_rank], job.on_node(node_rank))


BACKENDS: dict[str, type[Backend]] = {
    kind.name: kind for kind in (Pdsh, OpenMpi, Mpich, IntelMpi, Mvapich, Slurm, Torchrun, Standard, NoSsh, Local)
}
