"""A job: the program, its nodes and cores, and its variables. It is sent to hosts as one word that needs no quoting.

The variables are those with known prefixes and those in `.deepspeed_env`.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_zero.device.cores import Cores, usable_cores
from hf_zero.launch import LaunchError, shown
from hf_zero.launch.world import VISIBLE_DEVICES, Node, RankPlace, World
from hf_zero.rank_environment import LOCAL_ADDRESS

_MAX_CORE = 1 << 16


def parse_cores(words: str) -> tuple[int, ...]:
    """Parse a core list: `0,2-4,6` -> (0, 2, 3, 4, 6). Numbers and ranges must be ascending.

    Raises:
        LaunchError: for anything else.
    """
    cores: list[int] = []
    for part in words.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", part)
        if match is None:
            raise LaunchError(f"--bind_core_list {shown(words)}: {shown(part)} is neither a core nor a range like 0-7")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last > _MAX_CORE or (cores and first <= cores[-1]):
            raise LaunchError(
                f"--bind_core_list {shown(words)}: {shown(part)} must be ascending, greater than the part before it, "
                f"and at most {_MAX_CORE}"
            )
        cores += range(first, last + 1)
    return tuple(cores)


def share_cores(cores: Sequence[int], num_ranks: int, local_rank: int) -> tuple[int, ...]:
    """The cores of one rank: equal contiguous parts, with remaining cores unused."""
    each = len(cores) // num_ranks
    if each == 0:
        raise LaunchError(f"--bind_cores_to_rank: {num_ranks} ranks cannot share {len(cores)} cores: run fewer")
    return tuple(cores[each * local_rank : each * (local_rank + 1)])


# Linux limits one argument to 128 KiB.
_MAX_WORD = 120 << 10


@dataclass(frozen=True)
class Program:
    """The program that every rank runs."""

    script: str
    arguments: tuple[str, ...]
    is_module: bool = False
    without_python: bool = False
    takes_local_rank: bool = True

    def command(self, local_rank: int, python: str = sys.executable) -> list[str]:
        """The argument vector of one rank."""
        start = [] if self.without_python else [python, "-u"] + ["-m"] * self.is_module
        given = [f"--local_rank={local_rank}"] if self.takes_local_rank else []
        return [*start, self.script, *given, *self.arguments]


@dataclass(frozen=True)
class RankCommand:
    """One process to start.

    Attributes:
        environment: variables in addition to those of the process that starts it.
        cores: the cores that it is bound to; empty for all.
    """

    rank: int
    command: tuple[str, ...]
    environment: dict[str, str]
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Job:
    """Everything that a node needs to start its ranks.

    Attributes:
        token: random; marks messages from nodes to the launcher within the output of the ranks.
        variables: set on every rank; variables such as RANK take precedence.
        log_folder: folder for one log file per rank; None for no logs.
        gives_devices: whether to set each rank's visible devices; Slurm sets them itself.
        core_list: the user's `--bind_core_list`; None for all cores of a host.
    """

    program: Program
    world: World
    master_addr: str
    master_port: int
    token: str = ""
    variables: Mapping[str, str] | None = None
    folder: str = "."
    log_folder: str | None = None
    gives_devices: bool = True
    binds_cores: bool = False
    core_list: str | None = None

    def encode(self) -> str:
        """Encode the job as one word of letters, digits, `-`, `_` and `=`.

        Raises:
            LaunchError: if it is too long for a command line.
        """
        word = base64.urlsafe_b64encode(zlib.compress(json.dumps(asdict(self)).encode())).decode()
        if len(word) > _MAX_WORD:
            raise LaunchError(
                f"the arguments and variables of this job take {len(word)} bytes, more than the {_MAX_WORD} that fit "
                "into a command line: remove variables that ranks do not need from .deepspeed_env"
            )
        return word

    @staticmethod
    def decode(word: str) -> Job:
        try:
            fields = json.loads(zlib.decompress(base64.urlsafe_b64decode(word)))
            nodes = tuple(Node(node["name"], tuple(node["slots"])) for node in fields.pop("world")["nodes"])
            program = fields.pop("program")
            program["arguments"] = tuple(program["arguments"])
            return Job(program=Program(**program), world=World(nodes), **fields)
        except (binascii.Error, zlib.error, ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"this is not a job of `hf-zero launch`: {error}") from None

    def on_node(self, node_rank: int) -> list[RankCommand]:
        return [self._rank(place) for place in self.world.places() if place.node_rank == node_rank]

    def of_rank(self, rank: int, first_host: str | None = None) -> RankCommand:
        """The command of one rank; `first_host` is rank 0's host, if the job does not have its address."""
        return self._rank(list(self.world.places())[rank], first_host)

    def _rank(self, place: RankPlace, first_host: str | None = None) -> RankCommand:
        node = self.world.nodes[place.node_rank]
        environment = {
            **(self.variables or {}),
            "MASTER_ADDR": self.master_addr or first_host or LOCAL_ADDRESS,
            "MASTER_PORT": str(self.master_port),
            "RANK": str(place.rank),
            "LOCAL_RANK": str(place.local_rank),
            "WORLD_SIZE": str(self.world.num_ranks),
            "LOCAL_WORLD_SIZE": str(len(node.slots)),
            "LOCAL_SIZE": str(len(node.slots)),
            "CROSS_RANK": str(place.node_rank),
            "CROSS_SIZE": str(len(self.world.nodes)),
        }
        if self.gives_devices:
            environment[VISIBLE_DEVICES] = ",".join(node.slots)
        cores = self._cores(len(node.slots), place.local_rank)
        if cores:
            environment["OMP_NUM_THREADS"] = str(len(cores))
        elif "OMP_NUM_THREADS" not in os.environ:
            # Otherwise every rank uses all cores, and ranks on a CPU mostly wait for each other.
            environment.setdefault("OMP_NUM_THREADS", str(Cores.here().equal_share(len(node.slots))))
        return RankCommand(place.rank, tuple(self.program.command(place.local_rank)), environment, cores)

    def _cores(self, num_ranks: int, local_rank: int) -> tuple[int, ...]:
        if not self.binds_cores:
            return ()
        if "KMP_AFFINITY" in os.environ:
            raise LaunchError("KMP_AFFINITY would move threads off the cores of --bind_cores_to_rank: unset it")
        cores = usable_cores() if self.core_list is None else parse_cores(self.core_list)
        return share_cores(cores, num_ranks, local_rank)


FILE_VARIABLE = "DS_ENV_FILE"
FILE_NAME = ".deepspeed_env"
MAX_BYTES = 4 << 20
# DeepSpeed's five prefixes, then those of hf_zero, Gloo, PyTorch's NCCL and OpenMP, and the timeout of process groups.
# This is a list because programs append to it as deepspeed.launcher.runner.EXPORT_ENVS.
PREFIXES = [
    "NCCL",
    "PYTHON",
    "MV2",
    "UCX",
    "MLFLOW",
    "HF_ZERO",
    "GLOO",
    "TORCH_NCCL",
    "OMP_NUM_THREADS",
    "DEEPSPEED_TIMEOUT",
]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# bash exports its functions under such names; ranks do not need them.
_SHELL_FUNCTION = re.compile(r"BASH_FUNC_.*")


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the launcher's environment that remote ranks get."""
    return {
        name: value for name, value in environment.items() if name.startswith(tuple(PREFIXES)) and _NAME.fullmatch(name)
    }


def read_env_files(environment: Mapping[str, str], folders: Iterable[Path]) -> dict[str, str]:
    """KEY=VALUE lines of the files named `.deepspeed_env` (DS_ENV_FILE) in `folders`; later files take precedence."""
    variables: dict[str, str] = {}
    name = environment.get(FILE_VARIABLE) or FILE_NAME
    for path in dict.fromkeys(Path(os.path.abspath(folder / name)) for folder in folders):
        try:
            if not path.is_file():
                continue
            if path.stat().st_size > MAX_BYTES:
                raise LaunchError(f"{shown(path)} is larger than {MAX_BYTES} bytes: remove unneeded variables")
            variables |= parse_env_file(path.read_bytes(), shown(path))
        except LaunchError:
            raise
        except (OSError, ValueError) as error:
            raise LaunchError(f"{shown(path)} cannot be read: {error}") from None
    return variables


def parse_env_file(content: bytes, source: str) -> dict[str, str]:
    """Parse KEY=VALUE lines. Quotes around a value are removed; nothing in it is expanded.

    Raises:
        LaunchError: for an invalid line; names file and line.
    """
    variables = {}
    for number, raw in enumerate(content.split(b"\n"), 1):
        line = os.fsdecode(raw).strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if _SHELL_FUNCTION.fullmatch(name):
            continue
        if not equals or not _NAME.fullmatch(name):
            raise LaunchError(f"{source}, line {number}: {shown(line)} should read NAME=VALUE")
        if "\0" in value:
            raise LaunchError(f"{source}, line {number}: the value of {name} contains a null byte")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        variables[name] = value
    return variables
