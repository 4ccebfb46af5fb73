"""Streaming training from host memory on a device with little memory: bytes per parameter, and time per step.

The device is an arena with a limit (tests/support/arena.py): exceeding it raises.

python -m bench.streaming --size 2b --budget-mb 300 --plain --name 2b
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

import hf_zero
from bench.models import SEED, Size, batches, build_model
from bench.surroundings import ROOT, about, keep
from hf_zero.optim.adam8 import AdamW8bit
from tests.support.arena import ArenaDevice, arena
from tests.support.late import use
from tests.support.memory import anonymous_memory

_LAYER: dict[str, int] = {"hidden": 1280, "intermediate": 3456, "vocabulary": 4096, "batch": 1, "length": 2}
SIZES = {
    "60m": Size(hidden=512, intermediate=1376, layers=20, vocabulary=1024, batch=1, length=2),
    "200m": Size(layers=10, **_LAYER),
    "400m": Size(layers=20, **_LAYER),
    "2b": Size(layers=100, **_LAYER),
}
STATES = {"fp32": 8.0, "bf16": 4.0, "8bit": 2 * (1 + 4 / 256)}  # bytes per parameter
SPLIT = 4.0  # bytes of a bf16 weight and its master
_RATE = 1e-4
_DRAWN = 999_983  # number of random weights, which all matrices repeat
log = logging.getLogger("bench")


def config_of(streaming: dict[str, Any] | None) -> dict[str, Any]:
    """The config for one device; without `streaming` masters and states are kept whole, as in DeepSpeed."""
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
    """Losses before each step and after the last, and the bytes of host and device."""
    before = time.perf_counter()
    model = _model(size)
    optimizer = _kind(states)(model.parameters(), lr=_RATE)
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
            with torch.no_grad():
                losses.append(engine(input_ids=tokens, labels=tokens).loss.item())
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


def plain_losses(size: Size, steps: int, states: str) -> list[float]:
    """The same losses without an engine: each parameter is updated in fp32 as soon as its gradient exists.

    Only the first weights and all gradients are kept between steps, and each update starts again from them: 2 bytes per
    parameter for the weights and, if there are later updates, 2 + 2 for each of the earlier ones.
    """
    model = _model(size)
    losses: list[float] = []
    first: dict[nn.Parameter, Tensor] = {}
    gradients: defaultdict[nn.Parameter, list[Tensor]] = defaultdict(list)

    @torch.no_grad()
    def update(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None, "called when it is there"
        gradients[parameter].append(parameter.grad)
        parameter.grad = None
        master = nn.Parameter(first.setdefault(parameter, parameter.detach().clone()).float().view(-1))
        optimizer = _kind(states)([master], lr=_RATE)
        for gradient in gradients[parameter]:
            master.grad = gradient.float().view(-1)
            optimizer.step()
        parameter.data.copy_(master.view_as(parameter))
        if len(losses) == steps:
            del first[parameter], gradients[parameter]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for tokens in batches(size, steps, 0):
        loss = model(input_ids=tokens, labels=tokens).loss
        losses.append(loss.item())
        loss.backward()
        del loss
    with torch.no_grad():
        losses.append(model(input_ids=tokens, labels=tokens).loss.item())
    return losses


def _kind(states: str) -> Any:
    return AdamW8bit if states == "8bit" else torch.optim.AdamW


class _Vectors(torch.autograd.Function):
    """A linear layer for few tokens that computes gradients from vectors: without bf16 arithmetic PyTorch takes ten to
    a hundred times as long for bf16 matrix products."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return nn.functional.linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight = ctx.saved_tensors
        rows, of_weight = gradient.reshape(-1, len(weight)), torch.zeros_like(weight)
        for row, tokens in zip(rows, inputs.reshape(len(rows), -1), strict=True):
            of_weight.addr_(row, tokens)
        return torch.stack([weight.t().mv(row) for row in rows]).view_as(inputs), of_weight


def _model(size: Size) -> nn.Module:
    """In bf16, because an fp32 model would need as much memory as its training; its weights are fast to generate."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with no_init_weights():
            model = build_model(size)
    finally:
        torch.set_default_dtype(default)
    drawn = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(SEED)).mul_(0.02).bfloat16()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_linear, module)  # type: ignore[method-assign]
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.ones_(parameter)
            continue
        for part in parameter.data.view(-1).split(_DRAWN):
            part.copy_(drawn[: part.numel()])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _linear(module: nn.Linear, inputs: Tensor) -> Tensor:
    result: Tensor = _Vectors.apply(inputs, module.weight)
    return result


def _on_device(engine: Any) -> list[torch.Tensor]:
    """The engine's tensors on the device: buffers of units, empty while released, and persistent parameters."""
    store = engine.gradients.assembly.store
    parts = [(unit, part) for unit in store.units for part in unit.parts]
    rows = [part.stored.tensor for unit, part in parts if unit.is_persistent]
    return [part.whole.full for _, part in parts] + rows + list(engine.module.buffers())


def _host_bytes(engine: Any) -> int:
    """Bytes of weights, masters and states between steps."""
    updater = engine.optimizer.updater
    stored = [sub_group.stored for sub_group in updater.sub_groups]
    states = sum(value.nbytes for state in updater.optimizer.state.values() for value in state.values() if value.dim())
    return int(states + sum(one.master.num_bytes + one.lp_param.num_bytes for one in stored))


def _gradient_numel(engine: Any) -> int | None:
    """Peak number of gradient elements in host memory; None if all gradients stay there."""
    gradients = engine.gradients.assembly.reducer.buckets[0].trained.placement.gradients
    most: int | None = getattr(gradients, "most_out", None)
    return most


def main() -> None:
    """Train each way in a separate process, then write JSON and Markdown."""
    arguments = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.worker is not None:
        torch.set_num_threads(arguments.threads)
        size, states = SIZES[arguments.size], arguments.worker
        if arguments.plain:
            found = {"losses": plain_losses(size, arguments.steps, states)}
        else:
            found = train(size, arguments.steps, states, limit=arguments.budget_mb * 10**6)
        sys.stdout.write(f"\n{json.dumps(found)}\n")
        return
    run = {
        **about("bench.streaming"),
        "budget_mb": arguments.budget_mb,
        "states": {states: _both(arguments, states) for states in arguments.states},
    }
    text = report(run)
    keep(run, text, f"streaming-{arguments.name}", arguments.results)
    log.info("%s\nwritten to %s", text, arguments.results)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="400m")
    parser.add_argument("--states", choices=sorted(STATES), nargs="+", default=["8bit"])
    parser.add_argument("--budget-mb", type=int, default=300, help="memory limit of the device")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="also compute the losses without an engine")
    parser.add_argument("--worker", choices=sorted(STATES), help=argparse.SUPPRESS)
    parser.add_argument("--name", default="400m", help="part of the result files' names")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    return parser.parse_args()


def _both(arguments: argparse.Namespace, states: str) -> dict[str, Any]:
    size, steps, budget, threads = arguments.size, arguments.steps, arguments.budget_mb, arguments.threads
    found = in_a_process(size, steps, states, budget_mb=budget, threads=threads)
    if arguments.plain and "failed" not in found:
        found["plain"] = in_a_process(size, steps, states, plain=True, threads=threads)
    return found


def in_a_process(
    size: str, steps: int, states: str, *, budget_mb: int = 300, plain: bool = False, threads: int = 1
) -> dict[str, Any]:
    """Runs `train`, or `plain_losses` if `plain`, in a process, which frees all memory at its end."""
    words = ["--worker", states, "--size", size, "--steps", str(steps), "--budget-mb", str(budget_mb)]
    words += ["--threads", str(threads), *["--plain"] * plain]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "bench.streaming", *words]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        return {"failed": ended.stderr.strip().splitlines()[-1][:200]}
    found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found


def report(run: dict[str, Any]) -> str:
    """The report in Markdown."""
    place = run["machine"]
    lines = [
        "# Training that lives in host memory",
        "",
        f"{run['date']} · {place['cpu']}, {place['cores']} cores, {place['memory_gib']} GiB, load "
        f"{place['load_1min']} at the end · Python {place['python']}, torch {run['versions']['torch']}",
        "",
        f"`{run['command']}`: one rank at stage 3, bf16, gradient checkpointing, 2 tokens per step, on a device of "
        f"{run['budget_mb']} MB (an arena: more at once raises). Bytes per parameter are those of weights, masters and "
        "states between steps. Losses are those before each step and after the last one.",
        "",
        "| states | parameters | host, GB | bytes per parameter | formula | process at most, GB "
        "| gradients at once, MB | device at most, MB | largest unit, MB | seconds per step | losses "
        "| without an engine |",
        "|" + " --- |" * 12,
    ]
    for states, found in run["states"].items():
        if "failed" in found:
            lines.append(f"| {states} | {found['failed']} |" + " |" * 10)
            continue
        numel, seconds = found["numel"], ", ".join(f"{one:.1f}" for one in found["step_s"])
        formula, gradients = SPLIT + STATES[states], found["gradient_numel"] * 2 / 1e6
        lines.append(
            f"| {states} | {numel / 1e9:.3f} billion | {found['host_bytes'] / 1e9:.2f} | "
            f"{found['host_bytes'] / numel:.4f} | {formula:.4f} | {found['process_peak'] / 1e9:.2f} | "
            f"{gradients:.0f} | {found['device_peak'] / 1e6:.0f} | {found['unit_numel'] * 2 / 1e6:.0f} | {seconds} | "
            f"{_words(found)} | {_words(found.get('plain', {}))} |"
        )
    return "\n".join(lines) + "\n"


def _words(found: dict[str, Any]) -> str:
    return str(found.get("failed", ", ".join(f"{loss:.7g}" for loss in found.get("losses", ())) or "-"))


if __name__ == "__main__":
    main()
