"""The modules that a plain training step loads: `python -m tests.support.loaded` lists those of hf_zero.

The step: stage 2, AdamW, one rank, a one-layer model, and a config with only these settings.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIG = {
    "train_batch_size": 4,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}
# Runs in a separate process, because this one has loaded more.
_STEP = """
import json, sys
import torch
import hf_zero

engine, *_ = hf_zero.initialize(model=torch.nn.Linear(4, 4), config=json.loads(sys.argv[1]))
engine.backward(engine(torch.randn(4, 4)).sum())
engine.step()
assert engine.global_steps == 1
print(json.dumps(sorted(sys.modules)))
"""


def loaded() -> list[str]:
    """The names of all modules that the step has loaded."""
    command = [sys.executable, "-c", _STEP, json.dumps(CONFIG)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    return modules


if __name__ == "__main__":
    sys.stdout.writelines(f"{module}\n" for module in loaded() if module.split(".")[0] == "hf_zero")
