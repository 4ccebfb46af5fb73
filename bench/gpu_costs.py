"""Blocks 2 to 4 of the GPU programme: what offload costs, the largest models of the machine, what the host costs.

Predictions come from the newest stored result (`bench.gpu_report`), scaled by tokens and parameters, or from the event
model (`hf_zero.planning`). Each case says which.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from bench import cpu_adam, gpu_report, gpu_train
from bench.gpu_device import Device, device_of
from bench.gpu_predictions import RUNS, measure, predict
from bench.gpu_programme import Case, Found, NotHere, Part, Place
from hf_zero.device.host_memory import host_empty
from hf_zero.planning.event_model import Shape

THREADS = (1, 2, 4, 8, 16)
LOCKED_GB, FORK_GB = 8, 4
WIDTHS = (1024, 2048, 4096)
# DeepSpeed reads them; HF_ZERO=0 leaves its name to it.
_OF_A_LAUNCHER = {
    "HF_ZERO": "0", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29533",
}  # fmt: skip
HOST_CASES = ("hf_zero 3", "fsdp2", "compute alone")


def parts(block: int, kind: str, options: argparse.Namespace) -> list[Part]:
    """All parts, the most valuable first."""
    return {2: _offload, 3: _largest, 4: _hosts}[block]()


# --- predictions -------------------------------------------------------------------------------------------------


@cache
def stored() -> dict[str, float]:
    """Seconds per step at 1.5B with 8 x 2,048 tokens, by case; of the latest session that has it."""
    run = gpu_report.kept()
    rows = [row for session in run["sessions"] for row in session.get("train", []) if "s_per_step" in row]
    return {row["case"]: float(row["s_per_step"]) for row in rows if row["size"] == "1.5b"}


@cache
def numel_of(size: str) -> int:
    hidden, heads, layers, _, _ = gpu_train.SIZES[size]
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in gpu_train.Llama(hidden, heads, layers).parameters())


def tokens_of(size: str, micro_batches: int = 1) -> int:
    _, _, _, batch, length = gpu_train.SIZES[size]
    return batch * length * micro_batches


def computing(size: str, micro_batches: int = 1) -> float:
    """Seconds of forward and backward, from the stored `compute alone` at 1.5B."""
    work = numel_of(size) * tokens_of(size, micro_batches) / (numel_of("1.5b") * tokens_of("1.5b"))
    return stored()["compute alone"] * work


def trained(case: str, size: str = "1.5b", micro_batches: int = 1, limit_s: float = 60.0, words: str = "") -> Case:
    """A case of `bench.gpu_train`, with its prediction: computing, and the rest of the stored step per parameter."""
    name = f"{case}, {size}, {micro_batches} micro-batches"
    look = f"{name}: parts_s, profile and the trace; the row's figures"
    way = gpu_train.OURS.get(case)
    plain = case.replace(" compiled", "").replace(" fp8", "")
    if way is not None and way.setup.streams:
        shape = Shape(size, numel_of(size), gpu_train.SIZES[size][2])
        setup = replace(way.setup, tokens=tokens_of(size, micro_batches), micro_batches=micro_batches)
        updating = gpu_train.predicted("H100", shape, setup)
        assert updating is not None
        floor = computing(size, micro_batches)
        seconds, source = max(updating, floor), "event model of an H100, not below the stored compute alone"
    elif (before := plain.removesuffix(" in step")) in stored():
        rest = stored()[before] - stored()["compute alone"]
        seconds = computing(size, micro_batches) + rest * numel_of(size) / numel_of("1.5b")
        source = "stored result: computing by tokens, the rest by parameters"
        if way is not None and way.setup.defers(1):
            seconds -= computing(size) / 4  # of forward, recomputation, and backward, which takes twice as long
            source += "; less one forward"
    else:
        return Case(name, f"no stored figure. {words}", look, limit_s=limit_s)
    expected = f"{seconds:.3g} s per update ({source}). {words}"
    return Case(name, expected.strip(), look, seconds, "s", limit_s)


# --- block 2 -----------------------------------------------------------------------------------------------------


def _offload() -> list[Part]:
    # The most valuable first: there may not be time for all.
    overlapped, in_step = "hf_zero 3 offload", "hf_zero 3 offload in step"
    once = ("compute alone", overlapped, in_step, "hf_zero 3 offload both")
    both = [trained(case) for case in once]
    both += [trained(case, micro_batches=4) for case in ("compute alone", overlapped, in_step)]
    both += [trained(case) for case in ("hf_zero 3 streaming", "hf_zero 3", "hf_zero 2 offload")]
    both += [trained(case, micro_batches=4) for case in ("hf_zero 3 streaming", "hf_zero 3 offload both")]
    beside = [trained("deepspeed 3 offload", micro_batches=4, limit_s=150)]  # it compiles its CPU Adam first
    larger = [trained(case, "3.2b", limit_s=80) for case in ("hf_zero 3 offload", "hf_zero 3 streaming")]
    adam = "28 bytes per parameter; no stored figure of this host: more threads until the memory bandwidth is reached"
    threads = tuple(Case(f"{number} threads", adam, "hf_zero/kernels/adam.py") for number in THREADS)
    where = "hf_zero/device/host_memory.py"
    memory = (
        Case(f"page-lock {LOCKED_GB} GiB, small pages", "at least 1 GB/s", where),
        Case(
            f"page-lock {LOCKED_GB} GiB, huge pages", "faster than small pages", "/sys/kernel/mm/transparent_hugepage"
        ),
        Case(f"page-lock {LOCKED_GB} GiB, by the engine", "as huge pages", where),
        Case(f"fork beside {FORK_GB} GiB, not locked", "less than 1 s", where),
        Case(f"fork beside {FORK_GB} GiB, locked", "copies all of it: longer than not locked", where),
        Case(f"fork beside {FORK_GB} GiB, locked by the engine", "less than 1 s: its pages are not forked", where),
    )
    return [
        Part("1.5B", "bench.gpu_costs:train", tuple(both), apart=True),
        Part("CPU Adam", "bench.gpu_costs:adam", threads),
        Part("host memory", "bench.gpu_costs:host_memory", memory, apart=True),
        Part("DeepSpeed", "bench.gpu_costs:train", tuple(beside), apart=True, environment=_OF_A_LAUNCHER),
        Part("3.2B", "bench.gpu_costs:train", tuple(larger), apart=True),
    ]


def train(case: str, place: Place) -> Found:
    """A case named as `trained` names it."""
    way, size, words = case.split(", ")
    micro_batches = int(words.split()[0])
    if (reason := gpu_train.missing(way)) is not None:
        raise NotHere(reason)
    device, in_shards = device_of(place.kind), size in ("7b wide", "14b")
    torch.manual_seed(0)
    steps = {"steps": 2, "warm_up": 1} if in_shards else {"steps": 4 if micro_batches == 1 else 3}
    if place.is_tiny:
        size, steps = "tiny", {"steps": 1, "warm_up": 1}
    # Traces are kept only where something is to be seen in them.
    traced = way in ("hf_zero 3 offload", "hf_zero 3 streaming") and size in ("1.5b", "tiny") and micro_batches == 1
    trace = place.folder / f"{way.replace(' ', '-')}.trace.json.gz" if traced else None
    found = gpu_train.measure(way, size, device, micro_batches=micro_batches, in_shards=in_shards, trace=trace, **steps)
    seconds, losses, peaks = found["s_per_step"], found["losses"], found["peaks"]
    spent = ", ".join(f"{name} {value:.2f}" for name, value in found["parts_s"].items())
    words = f"{seconds:.3g} s, {found['tokens_per_s']:,.0f} tokens/s, {found['tflops']:.0f} TFLOPS; {spent} s; peaks "
    words += ", ".join(f"{name} {value / 1e9:.1f} GB" for name, value in peaks.items())
    words += f"; made in {found['made_s']:.0f} s; losses {losses[0]:.3f} to {losses[-1]:.3f}"
    if "compiled" in way:
        words += f"; {found['graphs']} graphs compiled, then {found['recompilations']} more"
    falls = losses[-1] < losses[0] or way == "compute alone"
    holds = falls and not ("compiled" in way and (found["recompilations"] or not found["graphs"]))
    return Found(words, holds, seconds, {**found, "facts": device.facts()})


def adam(case: str, place: Place) -> Found:
    """The CPU Adam beside the same traffic without arithmetic."""
    number = int(case.split()[0])
    available = len(os.sched_getaffinity(0))
    if number > available:
        raise NotHere(f"{available} cores here")
    chosen = (cpu_adam.COPY, cpu_adam.FLOOR, cpu_adam.OURS, cpu_adam.OURS_SPLIT, cpu_adam.OURS_8)
    numel, rounds = (1 << 16, 2) if place.is_tiny else (1 << 27, 3)
    torch.set_num_threads(number)
    every = cpu_adam.contenders(numel)
    rates: dict[str, float] = {}
    for name in chosen:
        every[name]()
        seconds = statistics.median(cpu_adam.timed(every[name])[0] for _ in range(rounds))
        rates[name] = cpu_adam.BYTES[name] * numel / seconds / 1e9
    words = "; ".join(f"{name} {rate:.0f} GB/s" for name, rate in rates.items())
    return Found(words, None, figures={"gb_per_s": rates, "threads": number})


def host_memory(case: str, place: Place) -> Found:
    device = device_of(place.kind)
    unit = 1 << 20 if place.is_tiny else 1 << 30
    device.synchronize()  # creates its context
    if case.startswith("fork"):
        return _forked(device, FORK_GB * unit, case.partition(", ")[2])
    size = LOCKED_GB * unit
    start = time.perf_counter()
    if case.endswith("by the engine"):
        tensor = host_empty(size, torch.uint8, pinned=True)
        locked = bool(tensor.is_pinned()) if device.is_gpu else False
    else:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if "huge" in case:
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError as error:
                raise NotHere(f"the kernel refuses huge pages: {error}") from error
        tensor = torch.frombuffer(pages, dtype=torch.uint8)
        locked = device.lock(tensor)
    seconds = time.perf_counter() - start
    tensor.zero_()
    if not device.is_gpu:
        raise NotHere("page-locking needs a GPU's driver")
    rate = size / seconds / 1e9
    words = f"{'locked' if locked else 'refused'} in {seconds:.2f} s, {rate:.1f} GB/s"
    return Found(words, locked and rate >= 1, figures={"gb_per_s": rate})


def _forked(device: Device, size: int, how: str) -> Found:
    """Seconds of a fork whose child ends at once."""
    if how == "locked by the engine":
        tensor = host_empty(size, torch.uint8, pinned=True)
    else:
        tensor = torch.empty(size, dtype=torch.uint8)
    tensor.zero_()
    if how == "locked" and not device.lock(tensor) and device.is_gpu:
        return Found("page-locking failed", False)
    start = time.perf_counter()
    child = os.fork()
    if child == 0:
        os._exit(0)
    forked = time.perf_counter() - start
    os.waitpid(child, 0)
    start = time.perf_counter()
    tensor.fill_(1)
    touched = time.perf_counter() - start
    words = f"fork {1e3 * forked:.0f} ms; writing all of it afterwards {1e3 * touched:.0f} ms"
    return Found(words, None if how == "locked" else forked < 1, figures={"fork_s": forked, "touch_s": touched})


# --- block 3 -----------------------------------------------------------------------------------------------------


def _largest() -> list[Part]:
    bytes_of = {"": 12, " bf16": 8, " 8-bit": 4 + 2 * (1 + 4 / 256)}

    def case(states: str, size: str) -> Case:
        host = bytes_of[states] * numel_of(size) / 1e9
        return trained(f"hf_zero 3 streaming{states}", size, 1, 240, f"{host:.0f} GB of states on the host; loss falls")

    # 7B with fp32 states last: 14B is what nobody has published.
    cases = [case(" bf16", "7b wide"), case(" 8-bit", "14b"), case(" bf16", "14b"), case("", "7b wide")]
    return [Part("largest", "bench.gpu_costs:train", tuple(cases), apart=True)]


# --- block 4 -----------------------------------------------------------------------------------------------------


def _hosts() -> list[Part]:
    look = "bench.gpu_costs:host_time; cProfile of a step; docs/step.md"
    hosts = [
        Case(f"{way}, hidden {width}", "hf_zero 3 at most as FSDP2; the width does not matter", look)
        for width in WIDTHS
        for way in HOST_CASES
    ]
    compiled = [
        trained(f"hf_zero {stage} compiled", limit_s=150, words="No compilation after step 2") for stage in (0, 3)
    ]
    table = [
        trained(case)
        for case in ("hf_zero 3", "fsdp2", "hf_zero 0", "torch fused", "hf_zero 3 offload", "fsdp2 offload")
    ]
    faster = "faster than the stored run with transformers' default"
    mixture = [
        Case(f"{run.name}, grouped_mm", faster, "docs/experts.md", limit_s=90) for run in RUNS if "MoE" in run.model
    ]
    right = "plan's seconds within 20%, its bytes of tensors within 5%"
    planned = [Case(run.name, right, "hf_zero/planning/memory.py, event_model.py", limit_s=90) for run in RUNS]
    return [
        Part("host time", "bench.gpu_costs:host_time", tuple(hosts)),
        Part("compiled", "bench.gpu_costs:train", tuple(compiled), apart=True),
        Part("experts", "bench.gpu_costs:transformers_model", tuple(mixture)),
        Part("1.5B", "bench.gpu_costs:train", tuple(table), apart=True),
        Part("fp8", "bench.gpu_costs:train", (trained("hf_zero 3 fp8", words="Faster than bf16"),), apart=True),
        Part("plan", "bench.gpu_costs:transformers_model", tuple(planned), apart=True),
    ]


class Linear(nn.Module):
    """Equal units with little arithmetic."""

    recomputes = False

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


def host_time(case: str, place: Place) -> Found:
    """Microseconds per unit until the host has queued forward and backward, while the device waits for it."""
    from bench.gpu_nccl import RELEASED, groups_of_one, joined
    from hf_zero import initialize

    way, _, width = case.rpartition(", hidden ")
    device, depth, hidden = joined(place.kind), 24, 64 if place.is_tiny else int(width)
    torch.manual_seed(0)
    model = Linear(hidden, depth).to(device.device)
    x = torch.randn(8, hidden, device=device.device, dtype=torch.bfloat16)
    with groups_of_one(None) if way == "hf_zero 3" else nullcontext():
        if way == "hf_zero 3":
            config = {
                "train_micro_batch_size_per_gpu": 8,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 3, **RELEASED},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
                "steps_per_print": 1 << 30,
            }
            engine = initialize(model=model, config=config)[0]
            trainer = gpu_train.Trainer(engine, engine.backward, lambda is_last: engine.step(), engine=engine)
        elif way == "fsdp2":
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            for block in model.layers:
                fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
            fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

            def update(is_last: bool) -> None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

            trainer = gpu_train.Trainer(model, torch.Tensor.backward, update)
        else:
            trainer = gpu_train.Trainer(model.bfloat16(), torch.Tensor.backward, lambda is_last: model.zero_grad())
        times: dict[str, list[float]] = {"forward and backward": [], "update": []}
        for number in range(6 if place.is_tiny else 14):
            start = device.now()
            loss = trainer.model(x)
            trainer.backward(loss)
            queued = time.perf_counter()
            trainer.update(True)
            done = time.perf_counter()
            if number >= 4:
                times["forward and backward"].append(1e6 * (queued - start) / depth)
                times["update"].append(1e6 * (done - queued) / depth)
        device.synchronize()
        if trainer.engine is not None:
            trainer.engine.destroy()
    figures = {name: statistics.median(values) for name, values in times.items()}
    words = ", ".join(f"{name} {value:.0f} us per unit" for name, value in figures.items())
    return Found(words, None, figures=figures)


def transformers_model(case: str, place: Place) -> Found:
    """A run of `bench.gpu_predictions`, beside `plan`, or with grouped_mm beside its stored time."""
    from hf_zero.comm import init_distributed

    init_distributed()
    is_grouped = case.endswith(", grouped_mm")
    run = next(run for run in RUNS if run.name == case.removesuffix(", grouped_mm"))
    device = device_of(place.kind)
    found = measure(run, device.device, place.is_tiny, experts="grouped_mm" if is_grouped else None)
    seconds = found["s_per_step"]
    if is_grouped:
        sessions = gpu_report.kept()["sessions"]
        rows = [row for session in sessions for row in session.get("predictions", {}).get("rows", [])]
        before = next(row["s_per_step"] for row in rows if row["run"] == run.name)
        words = f"{seconds:.3g} s per step; transformers' default, stored: {before:.3g} s"
        return Found(words, None if place.is_tiny else seconds < before, figures=found)
    if place.is_tiny:
        return Found(f"{seconds:.3g} s per step; plan is about the whole model", figures=found)
    planned = predict(run, "h100", 128)
    of_time, of_size = seconds / planned["seconds"], found["allocated"] / planned["total"]
    words = f"{seconds:.3g} s, {of_time:.2f} of plan's; {found['allocated'] / 1e9:.1f} GB, {of_size:.2f} of plan's"
    return Found(words, abs(of_time - 1) <= 0.2 and abs(of_size - 1) <= 0.05, figures={**found, "plan": planned})
