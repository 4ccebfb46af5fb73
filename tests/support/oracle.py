"""Real DeepSpeed as an oracle: its interpreter's environment, and its one compiled operator, built in advance."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

BUILD_TIMEOUT_S = 280
# DeepSpeed loads this shared-memory operator on CPU regardless of DS_BUILD_OPS; compiling it can take minutes.
BUILD = """
from deepspeed.accelerator import get_accelerator
builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
if builder is not None and builder.is_compatible():
    builder.load()
"""


def oracle_environment(interpreter: str) -> dict[str, str]:
    """The environment for DeepSpeed without a GPU, with compiled operators in a folder that only these tests use.

    It is not the user's cache, because a run that is killed while building leaves a lock there, for which every later
    DeepSpeed process silently waits forever.
    """
    return {
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "HF_ZERO": "0",
        # Ninja is installed beside the interpreter. Always use the same one: another version rebuilds everything.
        "PATH": f"{Path(interpreter).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(Path(tempfile.gettempdir()) / f"hf_zero_oracle_operators_{os.getuid()}"),
    }


def build_operators(interpreter: str) -> None:
    """Compiles once, in one process, so that tests neither wait for it nor find a partially built operator."""
    environment = {**os.environ, **oracle_environment(interpreter)}
    for lock in Path(environment["TORCH_EXTENSIONS_DIR"]).glob("**/lock"):
        lock.unlink()  # of an earlier test session that was killed
    done = subprocess.run(
        [interpreter, "-c", BUILD], env=environment, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
    )
    assert done.returncode == 0, f"DeepSpeed cannot build its operators:\n{done.stdout}\n{done.stderr}"
