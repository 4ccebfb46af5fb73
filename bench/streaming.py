"""Training that lives in host memory, on a device that has almost none: bytes per parameter, and what a step takes.

The device is an arena with a limit (tests/support/arena.py): more of it at once raises.

python -m bench.streaming --size 2b --budget-mb 300 --name 2b
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import hf_zero  # noqa: E402
from bench.models import Size, batches, build_model  # noqa: E402
from bench.surroundings import keep, machine, public  # noqa: E402
from hf_zero.device.registry import use  # noqa: E402
from hf_zero.optim.adam8 import AdamW8bit  # noqa: E402
from tests.support.arena import ArenaDevice, arena  # noqa: E402
from tests.support.memory import anonymous_memory  # noqa: E402

_LAYER: dict[str, int] = {"hidden": 1280, "intermediate": 3456, "vocabulary": 4096, "batch": 1, "length": 2}
SIZES = {
    "60m": Size(hidden=512, intermediate=1376, layers=20, vocabulary=1024, batch=1, length=2),
    "200m": Size(layers=10, **_LAYER),
    "400m": Size(layers=20, **_LAYER),
    "2b": Size(layers=100, **_LAYER),
}
STATES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 * (1 + 4 / 256)}  # bytes per parameter
SPLIT = 4.0  # bytes of a bf16 weight and its master
log = logging.getLogger("bench")


def config_of(streaming: dict[str, Any] | None) -> dict[str, Any]:
    """Of a run on one device; without `streaming` everything is kept as DeepSpeed does, masters and states whole."""
    place: dict[str, Any] = {"device": "cpu", "pin_memory": False}
    sections = {} if streaming is None else {"hf_zero": {"streaming": {"enabled": True, **streaming}}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_max_live_parameters": 0,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 10_000,
        },
        **sections,
    }


def train(size: Size, steps: int, states: str, *, streams: bool = True, limit: int = 1 << 62) -> dict[str, Any]:
    """Losses of so many steps, and the bytes of host and device."""
    before, default = time.perf_counter(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # an fp32 model would need as much as it is trained with
    try:
        model = build_model(size)
    finally:
        torch.set_default_dtype(default)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    kind = AdamW8bit if states == "8bit" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-4)
    config = config_of({"states": "bf16" if states == "bf16" else "fp32"} if streams else None)
    with use(ArenaDevice()), anonymous_memory() as memory:
        engine, *_ = hf_zero.initialize(model=model, optimizer=optimizer, config=config)
        made_s, losses, seconds = time.perf_counter() - before, [], []
        with arena(limit, _on_device(engine)) as device:
            for tokens in batches(size, steps, 0):
                started = time.perf_counter()
                loss = engine(input_ids=tokens, labels=tokens).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                del loss
                seconds.append(time.perf_counter() - started)
        found = {
            "numel": sum(spec.numel for spec in engine.gradients.assembly.store.layout.specs),
            "losses": losses,
            "step_s": seconds,
            "made_s": made_s,
            "host_bytes": _host_bytes(engine),
            "gradient_numel": _gradient_numel(engine),
            "device_peak": device.peak,
            "unit_numel": max(unit.numel for unit in engine.gradients.assembly.store.units),
        }
        engine.destroy()
    return {**found, "process_peak": memory.peak}


def _on_device(engine: Any) -> list[torch.Tensor]:
    """What an engine keeps there: rooms of units, which are empty while these are released, and what stays gathered."""
    store = engine.gradients.assembly.store
    parts = [(unit, part) for unit in store.units for part in unit.parts]
    rows = [part.stored.tensor for unit, part in parts if unit.is_persistent]
    return [part._full for _, part in parts] + rows + list(engine.module.buffers())


def _host_bytes(engine: Any) -> int:
    """Of weights, masters and states between steps."""
    updater = engine.optimizer.updater
    stored = [sub_group.stored for sub_group in updater.sub_groups]
    states = sum(value.nbytes for state in updater.optimizer.state.values() for value in state.values() if value.dim())
    return int(states + sum(one.master.num_bytes + one.lp_param.num_bytes for one in stored))


def _gradient_numel(engine: Any) -> int | None:
    """The most elements of gradients that have been in host memory at once; None where all of them are."""
    gradients = engine.gradients.assembly.reducer.buckets[0].trained.placement.gradients
    most: int | None = getattr(gradients, "most_out", None)
    return most


def main() -> None:
    """Train each way in a process of its own, then write JSON and Markdown."""
    arguments = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.worker is not None:
        torch.set_num_threads(arguments.threads)
        size, limit = SIZES[arguments.size], arguments.budget_mb * 10**6
        found = train(size, arguments.steps, arguments.worker, limit=limit)
        sys.stdout.write(f"\n{json.dumps(found)}\n")
        return
    run = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "-m", "bench.streaming", *public(sys.argv[1:])]),
        "machine": machine(),
        "versions": {"torch": torch.__version__, "hf_zero": hf_zero.__version__},
        "budget_mb": arguments.budget_mb,
        "states": {states: _measured(arguments, states) for states in arguments.states},
    }
    text = report(run)
    keep(run, text, f"streaming-{arguments.name}", arguments.results)
    log.info("%s\nwritten to %s", text, arguments.results)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="400m")
    parser.add_argument("--states", choices=sorted(STATES), nargs="+", default=["8bit"])
    parser.add_argument("--budget-mb", type=int, default=300, help="of the device")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--worker", choices=sorted(STATES), help=argparse.SUPPRESS)
    parser.add_argument("--name", default="400m", help="part of the result files' names")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    return parser.parse_args()


def _measured(arguments: argparse.Namespace, states: str) -> dict[str, Any]:
    options = ["--size", arguments.size, "--budget-mb", str(arguments.budget_mb), "--steps", str(arguments.steps)]
    command = [sys.executable, "-m", "bench.streaming", "--worker", states, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [*command, "--threads", str(arguments.threads)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if ended.returncode:
        return {"failed": ended.stderr.strip().splitlines()[-1][:200]}
    found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


def report(run: dict[str, Any]) -> str:
    """The page."""
    place = run["machine"]
    lines = [
        "# Training that lives in host memory",
        "",
        f"{run['date']} · {place['cpu']}, {place['cores']} cores, {place['memory_gib']} GiB, load "
        f"{place['load_1min']} at the end · Python {place['python']}, torch {run['versions']['torch']}",
        "",
        f"`{run['command']}`: one rank at stage 3, bf16, gradient checkpointing, 2 tokens per step, on a device of "
        f"{run['budget_mb']} MB (an arena: more at once raises). Bytes per parameter are those of weights, masters and "
        "states between steps.",
        "",
        "| states | parameters | host, GB | bytes per parameter | formula | gradients at once, MB | device at most, MB "
        "| largest unit, MB | seconds per step | losses |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for states, found in run["states"].items():
        if "failed" in found:
            lines.append(f"| {states} | {found['failed']} |" + " |" * 8)
            continue
        numel, seconds = found["numel"], ", ".join(f"{one:.1f}" for one in found["step_s"])
        formula, gradients = SPLIT + STATES[states], found["gradient_numel"] * 2 / 1e6
        lines.append(
            f"| {states} | {numel / 1e9:.3f} billion | {found['host_bytes'] / 1e9:.2f} | "
            f"{found['host_bytes'] / numel:.4f} | {formula:.4f} | {gradients:.0f} | "
            f"{found['device_peak'] / 1e6:.0f} | {found['unit_numel'] * 2 / 1e6:.0f} | {seconds} | "
            f"{', '.join(f'{loss:.3f}' for loss in found['losses'])} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
