"""One rank of one measurement: builds the engine, warms up, measures steps and writes the results as JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import engines, meters, models


def main() -> None:
    """Measure what the command line specifies."""
    arguments = _parse()
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    _import_engine(arguments.engine)
    after_imports = meters.rss_mb()
    meters.reset_peak_rss()

    step = _build(arguments)
    size = models.SIZES[arguments.size]
    tokens = models.batches(size, arguments.warmup + arguments.steps + 2, rank)
    for batch in tokens[: arguments.warmup]:
        step(batch)
    result = _measure(step, tokens[arguments.warmup : -2])
    result["peak_mb"] = result.pop("peak_absolute_mb") - after_imports
    result["peak_steps_mb"] -= after_imports
    result["after_imports_mb"] = after_imports
    result["collectives"] = _count_collectives(arguments.engine, lambda: step(tokens[-2]))
    result["python"] = meters.profile_python(lambda: step(tokens[-1]))
    result["versions"] = _versions(arguments.engine)
    Path(f"{arguments.out}.{rank}").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        # DDP and FSDP also hold the group; if it is alive at exit, it can abort the interpreter.
        del step
        gc.collect()
        dist.destroy_process_group()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", required=True)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--size", choices=models.SIZES, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--released", type=int, default=0)
    parser.add_argument("--offload", default="")
    parser.add_argument("--nvme", default="")
    parser.add_argument("--adam", choices=("native", "torch"), required=True)
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def _import_engine(engine: str) -> None:
    """Import everything heavy, so that the memory measured from here on is the model's and the engine's."""
    if engine == "hf_zero":
        import hf_zero

        hf_zero.install()
    if engine in ("hf_zero", "deepspeed"):
        import deepspeed

        ours = "hf_zero" in str(deepspeed.__file__)
        if ours != (engine == "hf_zero"):
            raise RuntimeError(f"requested {engine}, but `deepspeed` is {deepspeed.__file__}")
    if engine.startswith("fsdp2"):
        import torch.distributed.fsdp  # noqa: F401


def _build(arguments: argparse.Namespace) -> engines.Step:
    model = models.build_model(models.SIZES[arguments.size])
    model.train()
    if arguments.engine in ("hf_zero", "deepspeed"):
        batch, released = models.SIZES[arguments.size].batch, bool(arguments.released)
        config = engines.ds_config(arguments.stage, batch, arguments.adam, released=released)
        if arguments.offload:
            zero = config["zero_optimization"]
            assert isinstance(zero, dict)
            zero["offload_optimizer"] = {"device": arguments.offload, "nvme_path": arguments.nvme}
        return engines.build_ds_step(model, config)
    if arguments.engine == "compute":
        dist.init_process_group("gloo")  # only for the barriers around the measurement
        return engines.build_compute_step(model)
    if arguments.engine == "ddp":
        return engines.build_ddp_step(model)
    dist.init_process_group("gloo")
    return engines.build_fsdp2_step(model, reshard=arguments.engine == "fsdp2-reshard")


def _measure(step: engines.Step, tokens: list[torch.Tensor]) -> dict[str, Any]:
    peak_before = meters.peak_rss_mb()
    meters.reset_peak_rss()
    dist.barrier()
    cpu_start, busy_start, wall_start = meters.cpu_s(), meters.machine_busy_s(), time.perf_counter()
    losses = [step(batch) for batch in tokens]
    cpu = meters.cpu_s() - cpu_start
    dist.barrier()
    wall, busy = time.perf_counter() - wall_start, meters.machine_busy_s() - busy_start
    return {
        "cpu_s": cpu / len(tokens),
        "wall_s": wall / len(tokens),
        "busy_s": busy / len(tokens),
        "peak_absolute_mb": max(peak_before, meters.peak_rss_mb()),
        "peak_steps_mb": meters.peak_rss_mb(),
        "losses": [float(loss) for loss in losses],
    }


def _count_collectives(engine: str, step: Callable[[], object]) -> dict[str, dict[str, int]]:
    """Counts one step's torch operators; hf_zero's own ledger counts its own, since it uses none on one machine."""
    if engine != "hf_zero":
        return meters.count_collectives(step)
    from hf_zero.comm import ledger

    ledger.reset()
    step()
    found: dict[str, dict[str, int]] = {}
    for (_, operation), tally in sorted(ledger.tallies.items()):
        entry = found.setdefault(operation, {"calls": 0, "bytes": 0})
        entry["calls"] += tally.calls
        entry["bytes"] += tally.num_bytes
    return found


def _versions(engine: str) -> dict[str, str]:
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if engine == "deepspeed":
        import deepspeed

        versions["deepspeed"] = deepspeed.__version__
    if engine == "hf_zero":
        import hf_zero

        versions["hf_zero"] = hf_zero.__version__
    return versions


if __name__ == "__main__":
    main()
