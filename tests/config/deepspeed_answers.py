"""Runs a small program under a real DeepSpeed's interpreter, with JSON as input and output."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.requirements import oracle_interpreter

_AROUND = """
import json, sys
given = json.load(open(sys.argv[1]))
{program}
json.dump(answer, open(sys.argv[2], "w"))
"""
# Nothing is compiled and no GPU is used: the questions are about numbers and names.
_ENVIRONMENT = {
    "DS_BUILD_OPS": "0",
    "DS_ACCELERATOR": "cpu",
    "HF_ZERO": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}


def ask_deepspeed(program: str, given: object, folder: Path, timeout_s: float = 120) -> Any:
    """Run `program`, which finds `given` and leaves `answer`; only in tests that carry the marker `oracle`."""
    interpreter = oracle_interpreter()
    assert interpreter is not None
    question, reply, script = folder / "given.json", folder / "answer.json", folder / "program.py"
    question.write_text(json.dumps(given))
    script.write_text(_AROUND.format(program=program))
    tools = {"PATH": f"{Path(interpreter).parent}{os.pathsep}{os.environ.get('PATH', '')}"}  # ninja is beside it
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [interpreter, str(script), str(question), str(reply)],
        env={**environment, **_ENVIRONMENT, **tools},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(reply.read_text())
