"""Lines of every package and its budget: `python -m tests.test_budgets` prints the table.

5% above a budget is a warning, 15% an error. A budget is only raised with a reason.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

from tests.support.step_path import StepPath, stage_2, stage_3_with_a_drive

PACKAGE = Path(__file__).resolve().parents[1] / "hf_zero"
WARNING, ERROR = 1.05, 1.15
# Package -> (lines of Python, their purpose). "" is the files of hf_zero itself.
BUDGETS = {
    "": (2_120, "command lines, the lowest layer, suggested replacements, learning-rate schedules"),
    "activations": (579, "inputs of checkpointed layers in host memory or in parts"),
    "api": (3_150, "initialize, the engine, messages of a run, zero.Init, safe_get_*, DeepSpeed's names on both"),
    "checkpoint": (5_350, "DeepSpeed's files both ways, streamed, at any shape; background saves"),
    "comm": (4_861, "NCCL, gloo, shared memory, the mesh, negotiation and plans, quantized wires"),
    "config": (5_230, "meaning, verdict and rules of every key; reports all problems at once with file and line"),
    "device": (718, "streams and memory of accelerators and CPUs"),
    "explain": (685, "what a config does, its corrected copy, and models of a hub that may be unreachable"),
    "extras": (9_460, "features that few configs use"),
    "grads": (1_100, "from autograd to reduced shards"),
    "integration": (5_700, "DeepSpeed's names, patches for transformers, accelerate, peft, trl"),
    "kernels": (2_429, "a reference and a GPU version of each"),
    "launch": (2_350, "pdsh, MPI, Slurm, torchrun; which rank failed and why; restarts of ranks by forking"),
    "layout": (1_187, "integers: buckets, units, shards, traffic"),
    "offload": (1_890, "host memory and NVMe"),
    "optim": (2_702, "optimizers on shards, whole matrices, 8-bit states"),
    "params": (3_500, "flat buffers, and stage 3's units"),
    # 180 of them for shapes and checkpointing, so that a plan does not load torch's compiler, a third of its CPU time,
    # and 20 for memory accesses of operators other than products, without which its steps were too short by half.
    "planning": (3_800, "predicted memory and time of a run"),
    "profiling": (2_348, "times, traffic, operations, memory, monitors"),
    "report": (356, "capabilities of a machine"),
    "sequence": (1_047, "Ulysses"),
    "step": (1_600, "agree, clip, update, gather"),
    "tensor": (1_277, "matrices split over ranks by transformers' plans"),
    "tiling": (1_120, "computation on tiles of tokens"),
}
MAX_FILES = 330  # of the whole package; only ever lowered
# (files, changes of file, frames to the fused update) of a steady step; only ever lowered. With a drive there are 232
# changes if it answers at once; a loaded machine waits for it a few more times.
PATHS = {"stage 2": (26, 112, 8), "stage 3 with a drive": (37, 237, 8)}


def lines() -> Counter[str]:
    """Package -> lines."""
    found: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        found[parts[0] if len(parts) > 1 else ""] += len(path.read_text(encoding="utf-8").splitlines())
    return found


def table() -> str:
    """All packages, largest first, and the total."""
    found = lines()
    rows = [f"{name or 'hf_zero':14}{num:8,}{BUDGETS.get(name, (0, ''))[0]:8,}" for name, num in found.most_common()]
    budget = sum(num for num, _ in BUDGETS.values())
    return "\n".join([f"{'package':14}{'lines':>8}{'budget':>8}", *rows, f"{'all':14}{found.total():8,}{budget:8,}"])


def test_packages_keep_their_budgets() -> None:
    found = lines()
    assert found.keys() == BUDGETS.keys(), "give a new package a budget, with its reason"
    over = {name: num / BUDGETS[name][0] for name, num in found.items() if num > WARNING * BUDGETS[name][0]}
    for name, share in over.items():
        warnings.warn(f"hf_zero/{name} has {share - 1:.0%} more lines than its budget", stacklevel=1)
    assert not any(share > ERROR for share in over.values()), table()
    assert sum(1 for _ in PACKAGE.rglob("*.py")) <= MAX_FILES


def test_the_path_of_a_step_grows_no_longer(tmp_path: Path) -> None:
    """Limits how many files a reader must follow to understand a step."""
    found = {"stage 2": stage_2(), "stage 3 with a drive": stage_3_with_a_drive(tmp_path)}
    for name, path in found.items():
        assert all(seen <= most for seen, most in zip(figures(path), PATHS[name], strict=True)), (name, figures(path))


def figures(path: StepPath) -> tuple[int, int, int]:
    return len(path.files), path.changes, path.frames


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
