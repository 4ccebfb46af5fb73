"""Trains a large model for a few steps in one process, optionally from a drive, and writes its measurements as JSON."""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero
from bench import meters
from bench import timeline as timelines

SHAPES = {
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "vocab_size": 32000, "heads": 32},
    "100m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 8192, "heads": 12},
}


def main() -> None:
    """Train and report; a run that does not fit reports that."""
    arguments = _parse()
    torch.set_num_threads(arguments.threads)
    hf_zero.install()
    imported = meters.rss_mb()
    if arguments.limit_gb:
        limit = int(arguments.limit_gb * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        result = _train(arguments)
    except (MemoryError, RuntimeError) as error:
        result = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    result |= {"after_imports_mb": imported, "versions": {"torch": torch.__version__, "hf_zero": hf_zero.__version__}}
    Path(arguments.out).write_text(json.dumps(result))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--folder", help="folder on the drive; default: no offload")
    parser.add_argument("--sub-group", type=int, default=10_000_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--limit-gb", type=float, default=0.0, help="limit of private memory (ulimit -d)")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def _config(arguments: argparse.Namespace) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": 3,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "sub_group_size": arguments.sub_group,
    }
    if arguments.folder:
        place = {"device": "nvme", "nvme_path": arguments.folder}
        zero["offload_optimizer"] = {**place, "buffer_count": 3, "fast_init": True}
        zero["offload_param"] = {**place, "max_in_cpu": 0, "buffer_count": 3, "buffer_size": 70_000_000}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }


def _train(arguments: argparse.Namespace) -> dict[str, Any]:
    import deepspeed  # imports hf_zero

    config, shape = _config(arguments), dict(SHAPES[arguments.shape])
    heads = shape.pop("heads")
    torch.manual_seed(0)
    meters.reset_peak_rss()
    started = time.perf_counter()
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = LlamaForCausalLM(
            LlamaConfig(**shape, num_attention_heads=heads, num_key_value_heads=heads // 8 or 1, use_cache=False)
        )
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()
    init_s, init_peak = time.perf_counter() - started, meters.peak_rss_mb()
    meters.reset_peak_rss()
    tokens = torch.randint(0, 8000, (1, arguments.length))
    steps = [_step(engine, tokens) for _ in range(arguments.steps - 1)]
    timeline = None
    if arguments.folder:
        with timelines.recorded(engine) as timeline:
            steps.append(_step(engine, tokens))
    else:
        steps.append(_step(engine, tokens))
    numel = sum(parameter.ds_numel for parameter in model.parameters())
    return {
        "numel": numel,
        "init_s": init_s,
        "init_peak_mb": init_peak,
        "steps_peak_mb": meters.peak_rss_mb(),
        "allowance_mb": _allowance(engine),
        "steps": steps,
        "timeline": None if timeline is None else timeline.plain(),
    }


def _step(engine: Any, tokens: torch.Tensor) -> dict[str, Any]:
    times, traffic = [time.perf_counter()], [_traffic(engine)]
    loss = engine(input_ids=tokens, labels=tokens).loss
    times.append(time.perf_counter())
    engine.backward(loss)
    times.append(time.perf_counter())
    traffic.append(_traffic(engine))
    engine.step()
    engine.optimizer.updater.stager.flush()
    times.append(time.perf_counter())
    traffic.append(_traffic(engine))
    moved = {key: traffic[2][key] - traffic[1][key] for key in traffic[0]}
    forward_s, backward_s, update_s = (end - start for start, end in zip(times, times[1:], strict=False))
    return {
        "loss": float(loss),
        "forward_s": forward_s,
        "backward_s": backward_s,
        "update_s": update_s,
        "update": {**moved, "gb_per_s": (moved["bytes_read"] + moved["bytes_written"]) / update_s / 1e9},
    }


def _traffic(engine: Any) -> dict[str, float]:
    total = {"bytes_read": 0.0, "bytes_written": 0.0, "waited_s": 0.0}
    for drive in engine.gradients.assembly.placements.drives:
        for key in total:
            total[key] += getattr(drive.requests.traffic, key)
    return total


def _allowance(engine: Any) -> dict[str, float]:
    """Megabytes that the plan allows: buffers, the largest unit's weights, and persistent parameters."""
    units = engine.module_view.store.units if hasattr(engine.module_view.store, "units") else ()
    largest = max((unit.numel for unit in units), default=0) * 2
    persistent = sum(unit.numel for unit in units if unit.is_persistent) * 2
    buffers = sum(drive.buffer_bytes for drive in engine.gradients.assembly.placements.drives)
    return {"buffers": buffers / meters.MB, "unit": largest / meters.MB, "persistent": persistent / meters.MB}


if __name__ == "__main__":
    main()
