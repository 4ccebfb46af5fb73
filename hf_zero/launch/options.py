"""The command line of `hf-zero launch`: that of DeepSpeed's launcher, option for option."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from hf_zero.launch import LaunchError
from hf_zero.quantities import nearest_flag

LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm", "torchrun", "standard", "nossh", "local")
DEFAULT_HOSTFILE = "/job/hostfile"
DEFAULT_PORT = 29500
NO_FILE_OF_ACCELERATE = "None"


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        _, is_unknown, flags = message.partition("unrecognized arguments: ")
        if is_unknown:
            flag = flags.split()[0]
            near = nearest_flag(flag, self._option_string_actions, {"--nproc-per-node": "--num_gpus"})
            message = f"there is no flag {flag}" + (f"; did you mean {near}?" if near else "")
        raise LaunchError(f"{message} (see `{self.prog} --help`)")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The options, with the script as `user_script` and what follows it as `user_args`.

    Raises:
        LaunchError: for options that are unknown, contradict each other or are not supported.
    """
    options = build_parser().parse_args(words)
    if (options.include or options.exclude) and (options.num_nodes != -1 or options.num_gpus != -1):
        raise LaunchError("--include and --exclude say it all: leave out --num_nodes and --num_gpus")
    if options.include and options.exclude:
        raise LaunchError("--include and --exclude exclude one another: give the shorter one")
    if options.module and options.no_python:
        raise LaunchError("--module is for Python, --no_python for programs that are none: give one of them")
    if options.bind_core_list is not None and not options.bind_cores_to_rank:
        raise LaunchError("--bind_core_list has no effect without --bind_cores_to_rank: give both or neither")
    if not 1 <= options.master_port <= 65535:
        raise LaunchError(f"--master_port {options.master_port} is not a valid port: choose one from 1024 to 65535")
    if options.max_restarts < 0 or options.stopped_timeout <= 0:
        raise LaunchError("--max_restarts is 0 or more, and --stopped_timeout a number of seconds above 0")
    if options.standby and not options.max_restarts:
        raise LaunchError("--standby has no effect without --max_restarts: give both or neither")
    if options.spare and not (options.no_ssh and options.max_restarts):
        raise LaunchError("--spare stands by for a host that is lost: it needs --no_ssh and --max_restarts")
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
        "those of DeepSpeed's launcher. On a machine without GPU, ranks are processes on its CPU.",
    )
    _hosts(parser.add_argument_group("nodes and ranks"))
    _meeting(parser.add_argument_group("how they are started and meet"))
    _program(parser.add_argument_group("what each rank runs"))
    parser.add_argument("user_script", help="a script, or with --module a module, or with --no_python any program")
    parser.add_argument("user_args", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _hosts(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "-H", "--hostfile", help=f"lines `name slots=N` (default: {DEFAULT_HOSTFILE} if it exists, else this machine)"
    )
    group.add_argument("-i", "--include", default="", help="only these: NODE[:SLOT,SLOT...][@NODE...]")
    group.add_argument("-e", "--exclude", default="", help="all but these, written as for --include")
    group.add_argument("--num_nodes", type=int, default=-1, help="the first so many hosts of the hostfile")
    group.add_argument(
        "--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks per host, with devices 0 to N-1"
    )


def _meeting(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--launcher", type=str.lower, default="pdsh", help=f"what starts ranks on other hosts: {', '.join(LAUNCHERS)}"
    )
    group.add_argument("--launcher_args", default="", help="more words for it, as one quoted argument")
    group.add_argument("--master_addr", default="", help="address of rank 0's host (default: asked of the first host)")
    group.add_argument("--master_port", type=int, default=DEFAULT_PORT, help="port of rank 0 (default: %(default)s)")
    group.add_argument("--node_rank", type=int, default=-1, help="with --no_ssh: which of the hosts this one is")
    group.add_argument("--no_ssh", action="store_true", help="start this host's ranks only; do so on every host")
    group.add_argument("--no_ssh_check", action="store_true", help="do not try the first host beforehand")
    group.add_argument("--ssh_port", type=int, help="where the hosts listen for ssh, if not at 22")
    group.add_argument(
        "--max_restarts", type=int, default=0, help="start all ranks again when one fails, so often (this machine's)"
    )
    group.add_argument(
        "--standby",
        action="store_true",
        help="with --max_restarts: a second set of ranks waits where training begins, to go on at once",
    )
    group.add_argument(
        "--spare",
        action="store_true",
        help="with --no_ssh and --max_restarts: take the place of any host but the first that is lost",
    )
    group.add_argument(
        "--stopped_timeout",
        type=float,
        default=5.0,
        help="with --max_restarts: seconds after which a rank that is stopped counts as dead (default: %(default)s)",
    )
    group.add_argument("--force_multi", action="store_true", help="use --launcher for a single host too")


def _program(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--module", action="store_true", help="as `python -m`")
    group.add_argument("--no_python", action="store_true", help="run the program itself, without Python")
    group.add_argument("--no_local_rank", action="store_true", help="do not hand --local_rank=N to the script")
    group.add_argument("--venv_script", help="a script that the remote shell reads first, like venv/bin/activate")
    group.add_argument("--bind_cores_to_rank", action="store_true", help="give every rank its own cores")
    group.add_argument("--bind_core_list", help="the cores to give out, like 0-7,16-23 (default: all)")
    group.add_argument("--enable_each_rank_log", metavar="DIR", help="write each rank's output to a file there instead")
    group.add_argument("--save_pid", action="store_true", help="write this process's number to /tmp/<number>.deepspeed")
    group.add_argument("--autotuning", choices=["tune", "run"], help="find stage and batch by trials; run: then train")
    group.add_argument(
        "--log_level", default="info", choices=["debug", "info", "warning", "error", "critical"], help="of the launcher"
    )
    group.add_argument("-q", "--quiet", action="store_true", help="--log_level error")
