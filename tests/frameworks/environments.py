"""The environments that `make test-frameworks` builds, and a function to run something in one of them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.launch import ROOT, Finished, launch

CHOSEN_VARIABLE = "HF_ZERO_FRAMEWORKS"
FOLDER = ROOT / ".frameworks"
RANKS = 2


def interpreter(name: str) -> str:
    """The Python of this framework's environment; skips if it was not built or not selected."""
    if name not in os.environ.get(CHOSEN_VARIABLE, name).split():
        pytest.skip(f"{name} is not among {CHOSEN_VARIABLE}={os.environ[CHOSEN_VARIABLE]!r}")
    python = FOLDER / name / "bin" / "python"
    if not (python.exists() and list(python.parent.parent.glob(".ready-*"))):
        pytest.skip(f"needs .frameworks/{name} (make test-frameworks FRAMEWORKS={name})")
    return str(python)


def run(
    name: str,
    script: str | Path,
    arguments: Sequence[object] = (),
    *,
    ranks: int | None = RANKS,
    launcher: Sequence[object] = (),
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> Finished:
    """Runs a script of this folder (or an absolute path) in the framework's environment; fails if the script does."""
    python = interpreter(name)
    path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {"PATH": path, **(environment or {})}
    path_of_script = Path(__file__).parent / script
    return launch(
        path_of_script,
        arguments,
        processes=ranks,
        launcher=launcher,
        python=python,
        environment=environment,
        timeout_s=timeout_s,
    ).check()
