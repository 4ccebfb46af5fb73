"""The `hf-zero launch` command. Its options are those of DeepSpeed's launcher.

`chosen_world` determines a job's nodes from the hostfile, the Slurm allocation, or the devices of this machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import secrets
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from hf_zero.launch import LaunchError, extra_service, shown
from hf_zero.launch.backends import BACKENDS, Backend
from hf_zero.launch.job import Job, Program, inherited, read_env_files
from hf_zero.launch.relay import BackendOptions
from hf_zero.launch.world import (
    MAX_SLOTS,
    VISIBLE_DEVICES,
    Node,
    World,
    check_host,
    exclude,
    include,
    limit,
    read_hostfile,
)
from hf_zero.network import address_towards
from hf_zero.quantities import nearest_flag
from hf_zero.rank_environment import LOCAL_ADDRESS, tasks_per_node

DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_PORT = 29500
NO_FILE_OF_ACCELERATE = "None"


class _Parser(argparse.ArgumentParser):
    """Raises `LaunchError` instead of exiting, so that all errors have the same form."""

    def error(self, message: str) -> NoReturn:
        _, is_unknown, flags = message.partition("unrecognized arguments: ")
        if is_unknown:
            flag = flags.split()[0]
            near = nearest_flag(flag, self._option_string_actions, {"--nproc-per-node": "--num_gpus"})
            message = f"there is no flag {flag}" + (f"; did you mean {near}?" if near else "")
        raise LaunchError(f"{message} (see `{self.prog} --help`)")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the options, with the script in `user_script` and its arguments in `user_args`.

    Raises:
        LaunchError: for options that are unknown, contradict each other or are not supported.
    """
    options = build_parser().parse_args(words)
    if (options.include or options.exclude) and (options.num_nodes != -1 or options.num_gpus != -1):
        raise LaunchError("--include and --exclude replace --num_nodes and --num_gpus: leave out the latter")
    if options.include and options.exclude:
        raise LaunchError("--include and --exclude are mutually exclusive: give the shorter one")
    if options.module and options.no_python:
        raise LaunchError("--module is for Python and --no_python for other programs: give only one of them")
    if options.bind_core_list is not None and not options.bind_cores_to_rank:
        raise LaunchError("--bind_core_list has no effect without --bind_cores_to_rank: give both or neither")
    if not 1 <= options.master_port <= 65535:
        raise LaunchError(f"--master_port {options.master_port} is not a valid port: choose one from 1024 to 65535")
    if options.max_restarts < 0 or options.stopped_timeout <= 0:
        raise LaunchError("--max_restarts must be 0 or more, and --stopped_timeout a number of seconds above 0")
    if options.standby and not options.max_restarts:
        raise LaunchError("--standby has no effect without --max_restarts: give both or neither")
    if options.spare and not (options.no_ssh and options.max_restarts):
        raise LaunchError("--spare replaces a host that is lost: it needs --no_ssh and --max_restarts")
    if options.ssh_port is not None and not 1 <= options.ssh_port <= 65535:
        raise LaunchError(f"--ssh_port {options.ssh_port} is not a valid port")
    if options.quiet:
        options.log_level = "error"
    return options


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hf-zero launch",
        allow_abbrev=False,
        usage="%(prog)s [options] script.py [arguments of the script]",
        description="Starts a script on all devices of this machine, or of the machines in a hostfile. The options are "
        "those of DeepSpeed's launcher. On a machine without a GPU, ranks run on its CPU.",
    )
    _hosts(parser.add_argument_group("nodes and ranks"))
    _meeting(parser.add_argument_group("launch and rendezvous"))
    _program(parser.add_argument_group("what each rank runs"))
    parser.add_argument("user_script", help="a script; with --module a module, with --no_python any program")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _hosts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-H", "--hostfile", help=f"lines `name slots=N` (default: {DEFAULT_HOSTFILE} if it exists, else this machine)"
    )
    group.add_argument("-i", "--include", default="", help="use only these: NODE[:SLOT,SLOT...][@NODE...]")
    group.add_argument("-e", "--exclude", default="", help="use all but these, in the format of --include")
    group.add_argument("--num_nodes", type=int, default=-1, help="use the first N hosts of the hostfile")
    group.add_argument(
        "--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks per host, with devices 0 to N-1"
    )


def _meeting(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--launcher", type=str.lower, default="pdsh", help=f"what starts ranks on other hosts: {', '.join(BACKENDS)}"
    )
    group.add_argument("--launcher_args", default="", help="extra arguments for the launcher, as one quoted string")
    group.add_argument("--master_addr", default="", help="address of rank 0's host (default: from the first host)")
    group.add_argument("--master_port", type=int, default=DEFAULT_PORT, help="port of rank 0 (default: %(default)s)")
    group.add_argument("--node_rank", type=int, default=-1, help="with --no_ssh: index of this host in the job")
    group.add_argument("--no_ssh", action="store_true", help="start only this host's ranks; run this on every host")
    group.add_argument("--no_ssh_check", action="store_true", help="do not test ssh to the first host")
    group.add_argument("--ssh_port", type=int, help="ssh port of the hosts, if it is not 22")
    group.add_argument(
        "--max_restarts", type=int, default=0, help="restart all ranks when one fails, up to N times (this machine's)"
    )
    group.add_argument(
        "--standby",
        action="store_true",
        help="with --max_restarts: keep a second set of ranks ready at the start of training, to continue at once",
    )
    group.add_argument(
        "--spare",
        action="store_true",
        help="with --no_ssh and --max_restarts: replace a lost host (any except the first)",
    )
    group.add_argument(
        "--stopped_timeout",
        type=float,
        default=5.0,
        help="with --max_restarts: seconds after which a stopped rank counts as dead (default: %(default)s)",
    )
    group.add_argument("--force_multi", action="store_true", help="use --launcher even for a single host")


def _program(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--module", action="store_true", help="run the script as `python -m` does")
    group.add_argument("--no_python", action="store_true", help="run the program itself, without Python")
    group.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=N to the script")
    group.add_argument("--venv_script", help="a script that the remote shell sources first, like venv/bin/activate")
    group.add_argument("--bind_cores_to_rank", action="store_true", help="give every rank its own cores")
    group.add_argument("--bind_core_list", help="the cores to use, like 0-7,16-23 (default: all)")
    group.add_argument("--enable_each_rank_log", metavar="DIR", help="write each rank's output to a file in DIR")
    group.add_argument("--save_pid", action="store_true", help="write this process's pid to /tmp/<pid>.deepspeed")
    group.add_argument("--autotuning", choices=["tune", "run"], help="tune stage and batch by trials; run: then train")
    group.add_argument(
        "--log_level", default="info", choices=["debug", "info", "warning", "error", "critical"], help="of the launcher"
    )
    group.add_argument("-q", "--quiet", action="store_true", help="--log_level error")


LOCALHOST = "localhost"
_COUNT = "import torch; print(torch.accelerator.device_count())"


def listed_world(options: argparse.Namespace, environment: Mapping[str, str]) -> World | None:
    """The nodes of the hostfile or Slurm allocation, before any filter; None if only this machine is used.

    Raises:
        LaunchError: for an invalid list, or if the given hostfile does not exist.
    """
    if options.hostfile not in (None, "", NO_FILE_OF_ACCELERATE):
        return read_hostfile(Path(options.hostfile))
    if options.hostfile != "" and Path(DEFAULT_HOSTFILE).is_file():
        return read_hostfile(Path(DEFAULT_HOSTFILE))
    if options.launcher == "slurm":
        return _allocation(options, environment)
    if options.hostfile == NO_FILE_OF_ACCELERATE:
        raise LaunchError("accelerate uses several machines and names no hostfile: give --deepspeed_hostfile FILE")
    return None


def chosen_world(options: argparse.Namespace, listed: World | None, environment: Mapping[str, str]) -> World:
    """The nodes and slots that the job uses."""
    world = _this_machine(options, environment) if listed is None else listed
    if options.include:
        return include(world, options.include)
    if options.exclude:
        return exclude(world, options.exclude)
    if listed is None and options.num_nodes > 1:
        raise LaunchError(f"--num_nodes {options.num_nodes} needs a hostfile that says which: --hostfile FILE")
    return limit(world, options.num_nodes, options.num_gpus)


def _this_machine(options: argparse.Namespace, environment: Mapping[str, str]) -> World:
    visible = environment.get(VISIBLE_DEVICES, "").strip()
    has_filter = bool(options.include or options.exclude or options.num_gpus > 0 or options.num_nodes > 1)
    if visible and not has_filter:
        # Indices or UUIDs, which are passed on unchanged.
        devices = [device.strip() for device in visible.split(",") if device.strip() not in ("", "-1")]
        if devices:
            return World((Node(LOCALHOST, tuple(devices)),))
    if visible and has_filter:
        ignored = f"{VISIBLE_DEVICES}={visible}"
        logger.warning("%s is ignored: the devices on the command line take precedence", ignored)
    if options.num_gpus > 0:
        return World((Node(LOCALHOST, ("0",)),))  # `limit` then sets the requested number
    return World((Node(LOCALHOST, tuple(str(index) for index in range(_count_devices()))),))


def _count_devices() -> int:
    """The number of GPUs according to torch, counted in a separate process; a machine without any has one rank."""
    try:
        environment = {name: value for name, value in os.environ.items() if name != VISIBLE_DEVICES}
        output = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, env=environment, check=True).stdout
        count = min(int(output.split()[-1]), MAX_SLOTS)
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise LaunchError(f"the devices of this machine cannot be counted ({error}): give --num_gpus") from None
    if count == 0:
        logger.info("no GPU on this machine: starting one rank on its CPU; --num_gpus N starts N ranks")
    return max(1, count)


def _allocation(options: argparse.Namespace, environment: Mapping[str, str]) -> World:
    """The nodes of the Slurm allocation that this process runs in."""
    words = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not words:
        raise LaunchError(
            "--launcher slurm needs a hostfile or a Slurm allocation: start it from an sbatch script or salloc"
        )
    try:
        output = subprocess.run(["scontrol", "show", "hostnames", words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaunchError(f"scontrol cannot expand the host list {shown(words)}: {error}") from None
    names = output.stdout.split()
    for name in names:
        check_host(name, "scontrol show hostnames")
    slots = tuple(str(slot) for slot in range(_slots_per_node(options, environment)))
    return World(tuple(Node(name, slots) for name in names))


def _slots_per_node(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    if options.num_gpus > 0:
        return int(options.num_gpus)
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        counts = tasks_per_node(environment.get(name, ""))
        if len(set(counts)) > 1:
            raise LaunchError(f"{name}={environment[name]}: request the same number of tasks on every node from Slurm")
        if counts and 1 <= counts[0] <= MAX_SLOTS and re.match(r"\d", environment[name]):
            return counts[0]
    return 1


logger = logging.getLogger("hf_zero.launch")
_USAGE = 2


def main(words: Sequence[str]) -> int:
    """Run the command. Returns the first failing rank's exit status, 128 + n after signal n, or 2 for invalid usage."""
    try:
        options = parse(words)
        return _run(options) if options.autotuning is None else _tune(options, words)
    except LaunchError as error:
        sys.stderr.write(f"hf-zero launch: {error}\n")
        return _USAGE


def _run(options: argparse.Namespace) -> int:
    logging.basicConfig(format="hf-zero launch: %(message)s", level=options.log_level.upper())
    listed = listed_world(options, os.environ)
    world = chosen_world(options, listed, os.environ)
    backend = choose_backend(options, world, has_hosts=listed is not None)
    request = BackendOptions(
        has_hosts=listed is not None,
        launcher_args=_launcher_args(options.launcher_args),
        node_rank=options.node_rank,
        ssh_port=options.ssh_port,
        venv_script=options.venv_script,
        max_restarts=options.max_restarts,
        stopped_s=options.stopped_timeout,
        is_spare=options.spare,
        stands_by=options.standby,
    )
    job = _job(options, world, backend, master_address(options, world, backend, has_hosts=listed is not None))
    logger.info("%s", describe(job, backend))
    with _pid_file(options.save_pid):
        return backend.run(job, request)


def _tune(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Tune the config by trials, each of which is a separate launch with the same options."""
    # Imported only when needed: the launcher itself needs neither torch nor the config.
    from hf_zero.config import ConfigError

    num_script = 1 + len(options.user_args)
    ours = list(words[: len(words) - num_script])
    for index, word in enumerate(ours):
        if word.partition("=")[0] == "--autotuning":
            del ours[index : index + (1 if "=" in word else 2)]
            break
    try:
        script = words[len(words) - num_script :]
        status: int = extra_service("tune")([*ours, *script], num_script, then_run=options.autotuning == "run")
    except ConfigError as error:
        raise LaunchError(str(error)) from None
    return status


def choose_backend(options: argparse.Namespace, world: World, *, has_hosts: bool) -> Backend:
    """The backend for the options. A single host is taken to be this machine, except with --force_multi or Slurm.

    Raises:
        LaunchError: for an unknown launcher, and for options that the chosen one does not support.
    """
    if options.launcher not in BACKENDS:
        raise LaunchError(f"--launcher {shown(options.launcher)} must be one of {', '.join(BACKENDS)}")
    name = options.launcher
    is_alone = len(world.nodes) == 1 and not options.force_multi and name != "slurm"
    if options.no_ssh:
        name = "nossh" if has_hosts else "local"
    elif is_alone and BACKENDS[name].is_remote:
        name = "local"
    backend = BACKENDS[name]()
    if backend.is_remote and not has_hosts:
        raise LaunchError(f"--launcher {name} starts ranks on other hosts and needs a hostfile that names them")
    if name not in ("pdsh", "nossh", "local") and options.venv_script is not None and name not in backend.refuses:
        raise LaunchError(f"--venv_script is for remote shells, which {name} does not use: activate it beforehand")
    if options.max_restarts and name not in ("local", "nossh"):
        raise LaunchError(
            f"--max_restarts is not for --launcher {name}: run it on each host with --no_ssh --node_rank R, "
            "or use torchrun's (--launcher torchrun --launcher_args '--max-restarts N')"
        )
    if options.standby and name != "local":
        raise LaunchError(
            "--standby is for a single machine; with several machines, use --spare for a whole spare machine"
        )
    for option, reason in backend.refuses.items():
        if getattr(options, option, None) not in (None, False, ""):
            raise LaunchError(f"--{option} is not supported with --launcher {name}: {reason}")
    return backend


def master_address(options: argparse.Namespace, world: World, backend: Backend, *, has_hosts: bool) -> str:
    """The address at which all ranks reach rank 0: the given one, or the loopback address if all run on this machine,
    or that of the first host; empty if Slurm determines it.

    Raises:
        LaunchError: pdsh is used, and the first host does not answer over ssh.
    """
    if options.master_addr:
        return str(options.master_addr)
    first = world.nodes[0].name
    if not has_hosts or (len(world.nodes) == 1 and backend.name != "slurm" and not backend.is_remote):
        return LOCAL_ADDRESS
    if backend.name == "slurm":
        return ""
    if backend.name != "pdsh":
        return first  # each host resolves the name
    if first == LOCALHOST:
        return address_towards(world.nodes[-1].name) or LOCAL_ADDRESS
    return _ask_over_ssh(first, options)


def _ask_over_ssh(host: str, options: argparse.Namespace) -> str:
    """The host's first address. This also checks that ssh works without a password."""
    port = [] if options.ssh_port is None else ["-p", str(options.ssh_port)]
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", *port, host, "hostname", "-I"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"the address of {host} cannot be queried over ssh: {error}") from None
    if output.returncode != 0 and not (options.no_ssh_check and output.returncode != 255):
        reason = output.stderr.strip().splitlines()[-1:] or [f"exit status {output.returncode}"]
        raise LaunchError(
            f"{host} cannot be reached over ssh without a password ({reason[0][:200]}): set up keys, or start every "
            "host manually with --no_ssh --node_rank R"
        )
    addresses = output.stdout.split()
    if not addresses:
        raise LaunchError(f"{host} does not report an address (hostname -I): give --master_addr")
    check_host(addresses[0], f"the address of {host}")
    return addresses[0]


def _job(options: argparse.Namespace, world: World, backend: Backend, master: str) -> Job:
    program = Program(
        script=options.user_script,
        arguments=tuple(options.user_args),
        is_module=options.module,
        without_python=options.no_python,
        takes_local_rank=not options.no_local_rank and backend.name not in ("torchrun", "standard"),
    )
    folder = os.path.abspath(".")
    log_folder = options.enable_each_rank_log
    return Job(
        program=program,
        world=world,
        master_addr=master,
        master_port=options.master_port,
        token=secrets.token_hex(8),
        variables=travelling_variables(os.environ, folder),
        folder=folder,
        log_folder=None if log_folder in (None, "None") else os.path.abspath(log_folder),
        binds_cores=options.bind_cores_to_rank,
        core_list=options.bind_core_list,
    )


def travelling_variables(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """The variables for every rank: known ones of this environment, PYTHONPATH with `folder`, and `.deepspeed_env`."""
    known = inherited(environment)
    known["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, known.get("PYTHONPATH", "")]))
    return known | read_env_files(environment, [Path.home(), Path(folder)])


def describe(job: Job, backend: Backend) -> str:
    names = job.world.names
    hosts = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{job.world.num_ranks} ranks on {hosts} by {backend.name}: {shlex.join(job.program.command(0))}"


def _launcher_args(words: str) -> list[str]:
    """The words of --launcher_args, as a shell splits them."""
    try:
        return shlex.split(words)
    except ValueError as error:
        raise LaunchError(f"--launcher_args {shown(words)}: {error}") from None


@contextmanager
def _pid_file(is_wanted: bool) -> Iterator[None]:
    """Context in which /tmp/<pid>.deepspeed contains this process's pid; an existing file is never overwritten."""
    if not is_wanted:
        yield
        return
    path = Path(f"/tmp/{os.getpid()}.deepspeed")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise LaunchError(f"--save_pid cannot write {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(str(os.getpid()))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
