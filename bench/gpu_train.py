"""Llama-like models on one GPU: hf_zero at stages 0, 2, 3 and with offload, against FSDP2, torchao and DeepSpeed.

    python -m bench.gpu_train --json figures.json            # every case in a separate process, within --budget-s
    python -m bench.gpu_train --dry-run                      # tiny shapes, a few steps, on any device
    python -m bench.gpu_train --case "hf_zero 3 offload" --size 7b

bf16, AdamW, clipping to 1, recomputation. Reports tokens per second, peak device memory and the predicted size of the
model states (`hf_zero.planning.event_model`), and on a known GPU the predicted time of hf_zero. Cases that are not
installed or do not fit are listed as such.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.gpu_offload import VOCABULARY, Llama, covered
from bench.roofline import MACHINES, device_bytes
from bench.surroundings import ROOT
from hf_zero.planning.arguments import known_gpu
from hf_zero.planning.event_model import Machine, Setup, Shape, simulate

# name -> hidden, heads, layers, sequences, length
SIZES = {
    "tiny": (64, 2, 2, 2, 32),
    "0.5b": (1280, 20, 20, 8, 2048),
    "1.5b": (2048, 16, 28, 8, 2048),
    "7b": (4096, 32, 32, 4, 2048),
}
OURS = {
    "hf_zero 0": Setup(0),
    "hf_zero 2": Setup(2),
    "hf_zero 3": Setup(3),
    "hf_zero 2 offload": Setup(2, offload_optimizer=True),
    "hf_zero 3 offload": Setup(3, offload_optimizer=True, offload_parameters=True),
    "hf_zero 3 streaming": Setup(3, offload_optimizer=True, offload_parameters=True, streams=True, clips=False),
}
OTHERS = (
    "compute alone", "torch fused", "fsdp2", "deepspeed 0", "deepspeed 2", "deepspeed 3",
    "fsdp2 offload", "torchao offload", "deepspeed 2 offload", "deepspeed 3 offload",
)  # fmt: skip
NEEDS = {"torchao offload": "torchao"}
Step = Callable[[Tensor], Tensor]


def ds_config(setup: Setup, batch: int) -> dict[str, Any]:
    """The same for hf_zero and DeepSpeed."""
    zero: dict[str, Any] = {"stage": setup.stage}
    zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": True}} if setup.offload_optimizer else {}
    zero |= {"offload_param": {"device": "cpu", "pin_memory": True}} if setup.offload_parameters else {}
    config = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0 if setup.clips else 0.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
        "steps_per_print": 1 << 30,
    }
    if setup.streams:
        config["bf16"] |= {"check_grad_overflow": False}
        config["hf_zero"] = {"streaming": {"enabled": True}}
        del zero["offload_optimizer"]
    return config


def with_engine(module: str, model: Llama, setup: Setup, batch: int) -> Step:
    """`initialize` of hf_zero or DeepSpeed."""
    library = importlib.import_module(module)
    engine = library.initialize(model=model, model_parameters=model.parameters(), config=ds_config(setup, batch))[0]

    def step(tokens: Tensor) -> Tensor:
        loss: Tensor = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def with_torch(model: Llama, device: torch.device, case: str) -> Step:
    """fp32 masters and autocast, FSDP2 with or without CPU offload, or torchao's optimizer on the host."""
    model = model.cpu() if case == "fsdp2 offload" else model.to(device)
    if case.startswith("fsdp2"):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        # As in torchtitan: recomputation gets the inputs that FSDP has cast.
        model.recomputes = False
        model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in model.layers)

        offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if case.endswith("offload") else OffloadPolicy()
        options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16), "offload_policy": offload}
        for block in model.layers:
            fully_shard(block, **options)
        fully_shard(model, **options)
    optimizer: Any
    if case == "compute alone":  # the lower bound: bf16 weights without an update
        model = model.bfloat16()

        def compute(tokens: Tensor) -> Tensor:
            loss: Tensor = model(tokens)
            loss.backward()
            for parameter in model.parameters():
                parameter.grad = None
            return loss

        return compute
    if case == "torchao offload":
        from torchao.optim import CPUOffloadOptimizer

        model = model.bfloat16()
        optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=case == "torch fused"):
            loss: Tensor = model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def profiled(call: Callable[[], object], top: int = 12) -> dict[str, Any]:
    """One step under the profiler: shares of time in which the GPU computes and copies, and the slowest kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    spans: dict[str, list[tuple[float, float]]] = {"kernels": [], "copies": []}
    sums: dict[str, float] = {}
    for event in profile.events():
        # Named ranges of hf_zero span several kernels and the gaps between them.
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kind = "copies" if event.name.startswith(("Memcpy", "Memset")) else "kernels"
            spans[kind].append((event.time_range.start, event.time_range.end))
            name = event.name[:90]
            sums[name] = sums.get(name, 0.0) + (event.time_range.end - event.time_range.start) / 1e3
    longest = sorted(sums.items(), key=lambda item: -item[1])[:top]
    shares = {kind: covered(each) / 1e6 / seconds for kind, each in spans.items()}
    return {"s": seconds, "busy": shares, "num_kernels": len(spans["kernels"]), "longest_ms": dict(longest)}


def measure(case: str, size: str, steps: int, profile: bool = False) -> dict[str, Any]:
    """Runs one case in this process."""
    from hf_zero.comm import init_distributed

    hidden, heads, layers, batch, length = SIZES[size]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    init_distributed()
    torch.manual_seed(0)
    with device:  # where random numbers are generated fastest
        model = Llama(hidden, heads, layers)
    numel = sum(parameter.numel() for parameter in model.parameters())
    setup = OURS.get(case.replace("deepspeed", "hf_zero"))
    if setup is None:
        step = with_torch(model, device, case)
    else:
        step = with_engine("hf_zero" if case in OURS else "deepspeed", model, setup, batch)
    tokens = torch.randint(VOCABULARY, (batch, length), device=device)
    losses = [float(step(tokens)) for _ in range(2)]
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        losses.append(float(step(tokens)))  # synchronizes, as a training loop that logs does
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    found: dict[str, Any] = {"case": case, "size": size, "parameters": numel, "s_per_step": seconds, "losses": losses}
    found |= {"s_of_steps": times, "tokens_per_s": batch * length / seconds}
    if device.type != "cpu":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        found["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        if profile:
            found["profile"] = profiled(lambda: step(tokens))
    if setup is not None:
        found["predicted_states_gb"] = device_bytes(MACHINES[0], Shape(size, numel, layers), setup) / 1e9
    if case in OURS and device.type != "cpu":
        setup = replace(OURS[case], tokens=batch * length)
        found["predicted_s_per_step"] = predicted(torch.cuda.get_device_name(), Shape(size, numel, layers), setup)
    return found


def predicted(device: str, shape: Shape, setup: Setup) -> float | None:
    """Predicted seconds per step; None for an unknown GPU."""
    gpu = known_gpu(device)
    if gpu is None:
        return None
    machine = Machine(device, 1, gpu.flops, gpu.memory, 1e15, gpu.host_link, gpu.host_memory, gpu.capacity)
    return simulate(machine, shape, setup).seconds


def missing(case: str) -> str | None:
    """Requirements of a case that are not installed; DeepSpeed's is its own package, not hf_zero under its name."""
    module = NEEDS.get(case)
    if module and importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    if case.startswith("deepspeed"):
        from importlib.metadata import distributions

        names = {(found.metadata["Name"] or "").lower() for found in distributions() if found.files}
        return None if "deepspeed" in names else "deepspeed is not installed"
    return None


def apart(case: str, size: str, steps: int, timeout_s: float, profile: bool = False) -> dict[str, Any]:
    """Runs one case in a new process."""
    reason = missing(case)
    if reason:
        return {"case": case, "size": size, "skipped": reason}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    switch = {"HF_ZERO": "0"} if case.startswith("deepspeed") else {}
    words = [sys.executable, "-m", "bench.gpu_train", "--case", case, "--size", size, "--steps", str(steps)]
    words += ["--profile"] * profile
    try:
        result = subprocess.run(
            words, env={**os.environ, **place, **switch}, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return {"case": case, "size": size, "failed": f"no end within {timeout_s:.0f} s"}
    if result.returncode:
        return {"case": case, "size": size, "failed": (result.stderr.strip().splitlines() or ["?"])[-1]}
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def run(sizes: list[str], cases: list[str], steps: int, budget_s: float, profile: bool = False) -> list[dict[str, Any]]:
    """Every case of every size, small sizes first; cases beyond the budget are skipped and listed."""
    end, rows = time.monotonic() + budget_s, []
    for size in sizes:
        for case in cases:
            left = end - time.monotonic()
            late = {"case": case, "size": size, "skipped": f"beyond the budget of {budget_s:.0f} s"}
            rows.append(apart(case, size, steps, left, profile) if left > 0 else late)
            sys.stdout.write(f"{json.dumps(rows[-1])}\n")
            sys.stdout.flush()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help=f"run only one of {', '.join([*OURS, *OTHERS])}, in this process")
    parser.add_argument("--size", default="0.5b", choices=SIZES)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sizes", nargs="+", default=["0.5b", "1.5b", "7b"], choices=SIZES)
    parser.add_argument("--cases", nargs="+", default=[*OURS, *OTHERS], choices=[*OURS, *OTHERS])
    parser.add_argument("--budget-s", type=float, default=400, help="start no case after this many seconds")
    parser.add_argument("--profile", action="store_true", help="also run one step of each case under the profiler")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, one step")
    parser.add_argument("--json", type=Path, help="output file")
    options = parser.parse_args()
    if options.case:
        sys.stdout.write("\n" + json.dumps(measure(options.case, options.size, options.steps, options.profile)) + "\n")
        return
    sizes = ["tiny"] if options.dry_run else options.sizes
    rows = run(sizes, options.cases, 1 if options.dry_run else options.steps, options.budget_s, options.profile)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    failed = [row for row in rows if "failed" in row]
    sys.exit(f"{len(failed)} cases failed" if options.dry_run and failed else 0)


if __name__ == "__main__":
    main()
