"""The modules of hf_zero that a plain training step loads: `python -m tests.support.loaded` lists them by package.

The step: stage 2, AdamW, one rank, a one-layer model, and a config with only these settings.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
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
found = {n: m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "hf_zero" and getattr(m, "__file__", None)}
print(json.dumps(found))
"""


def loaded() -> dict[str, int]:
    """module -> lines, for all modules that the step has loaded."""
    command = [sys.executable, "-c", _STEP, json.dumps(CONFIG)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    files: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return {module: len(Path(path).read_text(encoding="utf-8").splitlines()) for module, path in files.items()}


def by_package(modules: dict[str, int]) -> list[tuple[str, int, int]]:
    """(package, modules, lines), the largest first."""
    packages = {module: (module.split(".") + [""])[1] for module in modules}
    counted, lines = Counter(packages.values()), Counter[str]()
    for module, num in modules.items():
        lines[packages[module]] += num
    return [(package, counted[package], num) for package, num in lines.most_common()]


def main() -> None:
    modules = loaded()
    for package, num_modules, num_lines in by_package(modules):
        sys.stdout.write(f"{package or 'hf_zero':20}{num_modules:5}{num_lines:8}\n")
    sys.stdout.write(f"{'all':20}{len(modules):5}{sum(modules.values()):8}\n")


if __name__ == "__main__":
    main()
