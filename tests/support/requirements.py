"""A test's requirements beyond the package; the skip reason lists everything that is missing."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

ORACLE_VARIABLE = "HF_ZERO_ORACLE_PYTHON"


def oracle_interpreter() -> str | None:
    """The Python that has real DeepSpeed installed, or None."""
    interpreter = os.environ.get(ORACLE_VARIABLE, "")
    return interpreter if interpreter and Path(interpreter).exists() else None


def missing(*, oracle: bool = False, gpus: int = 0, modules: tuple[str, ...] = ()) -> list[str]:
    """Everything that this machine lacks, in words."""
    lacks = []
    if oracle and oracle_interpreter() is None:
        value = os.environ.get(ORACLE_VARIABLE)
        lacks.append(f"real DeepSpeed ({ORACLE_VARIABLE}={value!r} is no interpreter; `make oracle` builds one)")
    if gpus > torch.cuda.device_count():
        lacks.append(f"{gpus} GPUs (found {torch.cuda.device_count()})")
    lacks += [f"the module {name}" for name in modules if importlib.util.find_spec(name) is None]
    return lacks


def requires(*, oracle: bool = False, gpus: int = 0, modules: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """Skips the test unless all of these are available."""
    lacks = missing(oracle=oracle, gpus=gpus, modules=modules)
    return pytest.mark.skipif(bool(lacks), reason="needs " + " and ".join(lacks))
