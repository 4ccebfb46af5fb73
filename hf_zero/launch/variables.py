"""Variables that go with the job: those with known beginnings, and the lines of `.deepspeed_env`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from hf_zero.launch import LaunchError, shown

FILE_VARIABLE = "DS_ENV_FILE"
FILE_NAME = ".deepspeed_env"
MAX_BYTES = 4 << 20
# DeepSpeed's first five, then what hf_zero, gloo, PyTorch's NCCL and OpenMP read in every rank. A list, because
# programs append to it under the name deepspeed.launcher.runner.EXPORT_ENVS.
PREFIXES = ["NCCL", "PYTHON", "MV2", "UCX", "MLFLOW", "HF_ZERO", "GLOO", "TORCH_NCCL", "OMP_NUM_THREADS"]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# bash exports its functions under such names; they mean nothing to a rank.
_SHELL_FUNCTION = re.compile(r"BASH_FUNC_.*")


def inherited(environment: Mapping[str, str]) -> dict[str, str]:
    """What a remote rank gets from the environment of the launcher."""
    return {
        name: value for name, value in environment.items() if name.startswith(tuple(PREFIXES)) and _NAME.fullmatch(name)
    }


def read_env_files(environment: Mapping[str, str], folders: Iterable[Path]) -> dict[str, str]:
    """KEY=VALUE lines of the files called `.deepspeed_env` (or DS_ENV_FILE) in the folders; later ones win."""
    found: dict[str, str] = {}
    name = environment.get(FILE_VARIABLE) or FILE_NAME
    for path in dict.fromkeys(Path(os.path.abspath(folder / name)) for folder in folders):
        try:
            if not path.is_file():
                continue
            if path.stat().st_size > MAX_BYTES:
                raise LaunchError(f"{shown(path)} is larger than {MAX_BYTES} bytes: remove what is not needed from it")
            found |= parse_env_file(path.read_bytes(), shown(path))
        except LaunchError:
            raise
        except (OSError, ValueError) as error:
            raise LaunchError(f"{shown(path)} cannot be read: {error}") from None
    return found


def parse_env_file(content: bytes, source: str) -> dict[str, str]:
    """KEY=VALUE lines. Values are taken as they are, without the quotes around them; nothing in them is expanded.

    Raises:
        LaunchError: with file and line.
    """
    found = {}
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
            raise LaunchError(f"{source}, line {number}: the value of {name} has a zero byte in it")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name] = value
    return found
