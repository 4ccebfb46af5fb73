"""Real DeepSpeed as an oracle: its interpreter's environment, and its one compiled operator built beforehand."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

BUILD_TIMEOUT_S = 280
# The shared-memory operator that DeepSpeed loads on CPU whatever DS_BUILD_OPS says; compiling it takes up to minutes.
BUILD = """
from deepspeed.accelerator import get_accelerator
builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
if builder is not None and builder.is_compatible():
    builder.load()
"""


def oracle_environment(interpreter: str) -> dict[str, str]:
    """What makes DeepSpeed run without a GPU, with compiled operators in a folder that only these tests use.

    The folder is not the user's own cache, because a run that is killed while it builds leaves a lock there that every
    later DeepSpeed process waits for, without end and without a word.
    """
    return {
        "DS_ACCELERATOR": "cpu",
        "DS_BUILD_OPS": "0",
        "HF_ZERO": "0",
        # Ninja is installed beside the interpreter. Always the same one: another version builds everything again.
        "PATH": f"{Path(interpreter).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(Path(tempfile.gettempdir()) / f"hf_zero_oracle_operators_{os.getuid()}"),
    }


def build_operators(interpreter: str) -> None:
    """Compile once, in one process, so that no test pays for it or meets a half-built operator."""
    environment = {**os.environ, **oracle_environment(interpreter)}
    for lock in Path(environment["TORCH_EXTENSIONS_DIR"]).glob("**/lock"):
        lock.unlink()  # of an earlier session of these tests that was killed
    done = subprocess.run(
        [interpreter, "-c", BUILD], env=environment, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
    )
    assert done.returncode == 0, f"DeepSpeed cannot build its operators:\n{done.stdout}\n{done.stderr}"
