"""One rank of bench/checkpoint.py: trains one step, then saves or loads for each line on stdin."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import engines, models
from bench.meters import cpu_s
from tests.support.memory import anonymous_memory

MARK = "RESULT "


def main() -> None:
    """`checkpoint_rank ENGINE STAGE SIZE`; each line is {"do": "save" or "load", "folder": ..., "tag": ...}."""
    name, stage, size = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    engine, version = build(name, stage, models.SIZES[size])
    say({"version": version})
    for line in sys.stdin:
        order = json.loads(line)
        folder, tag = order["folder"], order["tag"]
        if order["do"] == "save":
            found = measured(lambda: engine.save_checkpoint(folder, tag))  # noqa: B023
            found["then_durable_s"] = time_until_durable(Path(folder) / tag)
        else:
            found = measured(lambda: loaded(engine, folder, tag))  # noqa: B023
        say(found)
    dist.destroy_process_group()


def build(name: str, stage: int, size: models.Size) -> tuple[Any, str]:
    """An engine whose optimizer states all exist, and its version."""
    if name == "hf_zero":
        import hf_zero

        hf_zero.install()
    import deepspeed

    if ("hf_zero" in str(deepspeed.__file__)) != (name == "hf_zero"):
        raise RuntimeError(f"requested {name}, but `deepspeed` is {deepspeed.__file__}")
    model = models.build_model(size)
    config = engines.ds_config(stage, size.batch, "torch")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    (tokens,) = models.batches(size, 1, int(os.environ["RANK"]))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    version = hf_zero.__version__ if name == "hf_zero" else deepspeed.__version__
    return engine, f"{version} (torch {torch.__version__})"


def measured(act: Callable[[], object]) -> dict[str, float]:
    """Seconds between two barriers, CPU seconds, and the increase of anonymous memory."""
    dist.barrier()
    cpu, start = cpu_s(), time.perf_counter()
    with anonymous_memory() as memory:
        act()
    spent = cpu_s() - cpu
    dist.barrier()
    return {"wall_s": time.perf_counter() - start, "cpu_s": spent, "anonymous_mb": memory.grown / 1e6}


def loaded(engine: Any, folder: str, tag: str) -> None:
    """Load a checkpoint; raise if none was found."""
    path, _ = engine.load_checkpoint(folder, tag)
    if path is None:
        raise RuntimeError(f"nothing was loaded from {folder}")


def time_until_durable(folder: Path) -> float:
    """Seconds until `folder` is durable on disk; rank 0 syncs, all ranks wait."""
    start = time.perf_counter()
    if dist.get_rank() == 0:
        for path in [*folder.iterdir(), folder, folder.parent]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    dist.barrier()
    return time.perf_counter() - start


def say(found: dict[str, Any]) -> None:
    """Write one line for the parent process."""
    sys.stdout.write(f"{MARK}{json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
