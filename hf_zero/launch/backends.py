"""The ways to start ranks; `BACKENDS` has them by the name that `--launcher` takes.

pdsh runs one ssh per host, each of which starts that host's ranks. mpirun, of Open MPI, or of MPICH, Intel and MVAPICH
(all Hydra), and srun start `launch.ranks` once per rank; they only start the ranks: what these say to each other does
not go through MPI. Ranks on this host are all of a job, or this host's part of one that is started on each; we start
them, or torchrun, with which it may be an elastic job, too.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace

from hf_zero.config.extras import service
from hf_zero.launch import LaunchError
from hf_zero.launch.children import start
from hf_zero.launch.job import Job
from hf_zero.launch.ranks import report_to_user, run_node
from hf_zero.launch.relay import (
    Backend,
    Command,
    Request,
    launcher_environment,
    own_node_rank,
    python_variables,
    task_words,
)
from hf_zero.launch.restarts import TOKEN, Restarts
from hf_zero.launch.world import VISIBLE_DEVICES

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
        restarts = None
        if request.max_restarts:
            restarts = Restarts(request.max_restarts, request.stopped_s, start, stands_by=request.stands_by)
        return run_node(job, 0, report=report_to_user, restarts=restarts)


BACKENDS: dict[str, type[Backend]] = {
    kind.name: kind for kind in (Pdsh, OpenMpi, Mpich, IntelMpi, Mvapich, Slurm, Torchrun, Standard, NoSsh, Local)
}
