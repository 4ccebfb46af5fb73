"""Checks whether a training step on a GPU blocks the host, with torch's sync debug mode and a profiler trace.

    python -m bench.gpu_engine                                  # one GPU (every stage is stage 0 there)
    torchrun --nproc-per-node 8 -m bench.gpu_engine             # stages 0 to 3, with NCCL

Each row is one engine: bf16 or fp32, clipping, two micro-batches per update. After two warm-up updates, the third runs
under `torch.cuda.set_sync_debug_mode("error")`, where any synchronization raises, and the fourth under the profiler.
Waits in the trace are listed by name; cudaEventSynchronize reads the outcome of a step one step later.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.api.entry import initialize
from hf_zero.comm import destroy_process_group, get_rank, init_distributed

ROWS, WIDTH, DEPTH, MICRO_BATCHES = 8, 1024, 8, 2
WAITS = ("Synchronize", "aten::item", "aten::_local_scalar_dense", "Memcpy DtoH", "aten::nonzero")


class Blocks(nn.Module):
    """Blocks that stage 3 gathers one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(x).float().square().mean()


def config(stage: int, precision: str, kind: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": kind, "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}},
        "steps_per_print": 1 << 30,
    }


@contextmanager
def alarm() -> Iterator[None]:
    """Makes every synchronization of the host raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def examine(stage: int, precision: str, kind: str) -> dict[str, Any]:
    """One engine: the error of the debug mode, and the waits in the trace of one update."""
    torch.manual_seed(0)
    engine = initialize(model=Blocks(), config=config(stage, precision, kind))[0]
    x = torch.randn(ROWS, WIDTH, device=engine.device, dtype=torch.bfloat16 if precision == "bf16" else None)

    def update() -> None:
        for _ in range(MICRO_BATCHES):
            engine.backward(engine(x))
            engine.step()

    for _ in range(2):
        update()
    raised = _raised_by(update)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        update()
    trace = {
        event.key: event.count
        for event in profile.key_averages()
        # The profiler itself synchronizes with the device once, when it ends.
        if any(word in event.key for word in WAITS) and (event.key, event.count) != ("cudaDeviceSynchronize", 1)
    }
    norm = engine.get_global_grad_norm()
    engine.destroy()
    row = {"stage": stage, "precision": precision, "optimizer": kind}
    return {**row, "alarm": raised, "trace": trace, "norm": norm}


def _raised_by(update: Callable[[], None]) -> str | None:
    try:
        with alarm():
            update()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def run() -> list[dict[str, Any]]:
    """One row per engine, printed as they are measured, by rank 0."""
    cases = [(stage, precision, "AdamW") for stage in range(4) for precision in ("bf16", "fp32")]
    cases += [(2, "bf16", kind) for kind in ("Lion", "Lamb", "Adagrad")]
    rows = []
    for case in cases:
        rows.append(examine(*case))
        if get_rank() == 0:
            said = rows[-1]["alarm"] or "nothing waits"
            sys.stdout.write(
                f"stage {case[0]} {case[1]} {case[2]:8} {said}; in the trace: {rows[-1]['trace'] or '-'}\n"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="output file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.gpu_engine needs a GPU; without one run tests/step/test_no_waiting.py, which checks the same")
    init_distributed()
    rows = run()
    if options.json and get_rank() == 0:
        name = torch.cuda.get_device_name()
        options.json.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": rows}, indent=1))
    destroy_process_group()
    sys.exit("a step blocks the host" if any(row["alarm"] for row in rows) else 0)


if __name__ == "__main__":
    main()
