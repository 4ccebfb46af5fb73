"""The command `commands`: writes the programs `deepspeed` and `ds_report` again.

A real DeepSpeed has programs of the same names. Installing it replaces ours, and uninstalling it removes them. While it
is installed, programs of ours would call its own (`executables`), so there is nothing to restore.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from hf_zero.integration.distribution import AliasDistribution

NAMES = ("deepspeed", "ds_report")
_OWN = "hf-zero"
_LONGEST_LINE = 127  # of `#!` in older kernels


def main(words: Sequence[str] | None = None) -> int:
    """Restore missing programs, and say for each what was done. Returns 1 if one could not be written."""
    description = "Write the programs deepspeed and ds_report again, which uninstalling a real DeepSpeed removes."
    argparse.ArgumentParser(prog="hf-zero commands", description=description).parse_args(words)
    lines = list(restore(folder_of_programs()))
    sys.stdout.write("".join(f"{line}\n" for line, _ in lines))
    return int(any(failed for _, failed in lines))


def restore(folder: Path) -> Iterator[tuple[str, bool]]:
    """Write the programs that `folder` lacks. Yields for each a line about it, and whether it could not be written."""
    real = _real_deepspeed()
    for name in NAMES:
        path = folder / name
        if real:
            yield f"{path}: left to DeepSpeed {real}, which is installed", False
        elif path.exists():
            yield f"{path}: in place" if _is_ours(path) else f"{path}: left alone, as it is not hf_zero's", False
        else:
            try:
                path.write_text(_program(name), encoding="utf-8")
                path.chmod(0o755)
            except OSError as error:
                yield f"{path}: cannot be written: {error.strerror}", True
            else:
                yield f"{path}: restored", False


def folder_of_programs() -> Path:
    """The folder of the program `hf-zero`, else that of this Python's programs."""
    try:
        files = metadata.distribution("hf-zero").files or ()
    except metadata.PackageNotFoundError:
        files = ()
    places = (Path(str(file.locate())) for file in files if file.name == _OWN)
    return next((Path(os.path.normpath(place.parent)) for place in places), Path(sysconfig.get_path("scripts")))


def _real_deepspeed() -> str:
    """The version of an installed DeepSpeed, or ""."""
    found = (each for each in metadata.distributions(name="deepspeed") if not isinstance(each, AliasDistribution))
    return next((each.version for each in found), "")


def _is_ours(path: Path) -> bool:
    return b"hf_zero.launch.executables" in path.read_bytes()


def _program(name: str) -> str:
    """The script that pip writes for an entry point."""
    line = f"#!{sys.executable}"
    if " " in line or len(line) > _LONGEST_LINE:
        line = f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''"
    home = "hf_zero.launch.executables"
    return f'{line}\nimport sys\n\nfrom {home} import {name}\n\nif __name__ == "__main__":\n    sys.exit({name}())\n'
