"""Checks every kernel on a GPU against its reference, then times it against the card's copy bandwidth.

    python -m bench.gpu_suite                       # everything, under ten minutes on one large GPU
    python -m bench.gpu_suite --quick               # smaller vectors; --json FILE stores the results
    python -m bench.gpu_suite --dry-run             # a tiny trial run on the CPU; --card H100 shows the table

At the end each measured prediction of docs/performance.md is printed next to its measurement. The predictions of
kernels are lower bounds: a ratio below 1 is an error in the prediction, one far above 1 a kernel slower than assumed.

Needs only torch and Triton, so that it runs from a checkout on a fresh machine, without installing hf_zero.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import kernel_times
from hf_zero.kernels.adam import AdamRule, adam
from hf_zero.kernels.adam8 import BlockVectors, adam8
from hf_zero.kernels.dynamic8 import packed_bytes
from hf_zero.kernels.lamb import LambRule, lamb_apply, lamb_moments
from hf_zero.kernels.lion import LionRule, lion
from hf_zero.kernels.norm import sum_of_squares
from hf_zero.kernels.quantize import Feedback, new_messages, read_messages, sum_messages, write_messages
from hf_zero.kernels.signs import pack_signs_with_error, unpack_signs
from hf_zero.kernels.vectors import Applied, Vectors
from tests.kernels import adam8_cases, cases

SIZES = (1, 1000, 3 * 1024 + 17, (1 << 20) + 5)
FEW_SIZES = (1000,)  # of a dry run
RULE = AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)


def checks(device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, check) for every kernel, shape and dtype; a check raises AssertionError."""
    form, sizes = cases.Form(device=device), SIZES if device == "cuda" else FEW_SIZES
    scalar = torch.tensor(0.5, device=device)
    for name in cases.UPDATES:
        for numel in sizes:
            for types in cases.MIXTURES:
                yield (
                    f"{name} {numel} {types}",
                    lambda n=name, s=numel, t=types: cases.check_update(n, s, t, 0.125, form),
                )
            yield (
                f"{name} {numel} device scale",
                lambda n=name, s=numel: cases.check_update(n, s, cases.MIXTURES[0], scalar, form),
            )
        yield f"{name} skip flag", lambda n=name: cases.check_skip_flag(n, form)
        if name in cases.NARROW:
            yield f"{name} stochastic rounding", lambda n=name: cases.check_stochastic_rounding(n, form)
    for rule in adam8_cases.RULES:
        for numel, types in product(sizes, cases.MIXTURES):
            yield (
                f"adam8 {numel} {types}",
                lambda r=rule, s=numel, t=types: adam8_cases.check(
                    form, adam8_cases.vectors_for(s, t, form.device, 40, 8), r, 0.125
                ),
            )
    for dtype in cases.DTYPES:
        for numel in sizes:
            yield f"sum of squares {numel} {dtype}", lambda s=numel, d=dtype: cases.check_sum_of_squares(s, d, form)
        for numel in (8, 1000, (1 << 20) + 24)[: len(sizes)]:
            yield f"signs {numel} {dtype}", lambda s=numel, d=dtype: cases.check_signs(s, d, form)
        for bits in (8, 4):
            for rows, numel in ((1, 8), (3, 1000), (4, 1 << 18)):
                for check in (cases.check_messages, cases.check_feedback):
                    yield (
                        f"{check.__name__} {rows} of {numel} in {bits} bits {dtype}",
                        lambda c=check, r=rows, s=numel, k=bits, d=dtype: c(r, s, k, d, form),
                    )


def run_checks(device: str, jobs: int = 1) -> list[str]:
    """Names of the checks that failed; each failure is printed when it happens.

    Most of the time is spent compiling, which `jobs` processes do in parallel.
    """
    start, parts = time.perf_counter(), [(device, index, jobs) for index in range(jobs)]
    if jobs == 1:
        found = [part_of_checks(*parts[0])]
    else:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(part_of_checks, *zip(*parts, strict=True)))
    failed, done = [name for names, _ in found for name in names], sum(count for _, count in found)
    seconds = time.perf_counter() - start
    sys.stdout.write(f"{done - len(failed)} of {done} checks passed in {seconds:.0f} s\n")
    return failed


def part_of_checks(device: str, index: int, jobs: int) -> tuple[list[str], int]:
    """Every `jobs`-th check, starting at `index`: names of failed checks, and the number of checks."""
    failed, done = [], 0
    for name, check in islice(checks(device), index, None, jobs):
        done += 1
        try:
            check()
        except Exception:
            failed.append(name)
            sys.stdout.write(f"FAILED {name}\n{traceback.format_exc(limit=3)}\n")
            sys.stdout.flush()
    return failed, done


def milliseconds(call: Callable[[], object], repeats: int, device: str) -> float:
    """Median time of one call on the device, after two warm-up calls."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        if device == "cpu":
            began = time.perf_counter()
            call()
            times.append(1000 * (time.perf_counter() - began))
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def adam_rivals(numel: int, device: str) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Ways to update fp32 masters from bf16 gradients to bf16 weights: (name, bytes per parameter needed, one step)."""
    master, m, v = (torch.zeros(numel, device=device) for _ in range(3))
    gradient = torch.randn(numel, device=device).bfloat16()
    lp_param = torch.empty_like(gradient)
    vectors = Vectors(master, gradient, (m, v), lp_param)
    step = torch.ones((), device=device)
    kept = torch.empty(numel, device=device)

    def casts_and_fused() -> None:
        kept.copy_(gradient)
        torch._fused_adamw_(
            [master], [kept], [m], [v], [], [step],
            lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        lp_param.copy_(master)

    def as_deepspeed_steps() -> None:
        """The passes of DeepSpeed's step: cast, unscale the fp32 gradient in place, update, cast back."""
        kept.copy_(gradient)
        kept.mul_(0.5)
        torch._fused_adamw_(
            [master], [kept], [m], [v], [], [step],
            lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        lp_param.copy_(master)

    yield "adam, one pass", 28, lambda: adam(vectors, RULE, 5, Applied(0.5))
    yield "adam, stochastic", 28, lambda: adam(vectors, RULE, 5, Applied(0.5, seed=7))
    yield "torch fused AdamW and its casts", 28, casts_and_fused
    yield "cast, unscale, fused AdamW, cast (as DeepSpeed's step)", 28, as_deepspeed_steps


def other_kernels(numel: int, device: str) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """(name, bytes per element that must be moved, one call)."""
    weight, m, v = (torch.randn(numel, device=device).abs_() for _ in range(3))
    gradient = torch.randn(numel, device=device).bfloat16()
    lp_param = torch.empty_like(gradient)
    lion_rule = LionRule(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.01)
    lamb_rule = LambRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-6, weight_decay=0.01)
    block = numel // 64
    segments = [(start, block) for start in range(0, 64 * block, block)]
    one, two = Vectors(weight, gradient, (m,), lp_param), Vectors(weight, gradient, (m, v), lp_param)

    def lamb() -> None:
        ratios = lamb_rule.trust_ratios(lamb_moments(two, lamb_rule, segments))
        lamb_apply(two, lamb_rule, ratios * 1e-3, segments)

    packed = torch.empty(numel // 8, dtype=torch.uint8, device=device)
    states = tuple(torch.zeros(packed_bytes(numel), dtype=torch.uint8, device=device) for _ in range(2))
    eight = BlockVectors(weight, gradient, states, lp_param)
    yield "adam with 8-bit states", 16.06, lambda: adam8(eight, RULE, 5)
    yield "lion", 20, lambda: lion(one, lion_rule)
    yield "lamb, 64 tensors", 40, lamb
    yield "sum of squares, bf16", 2, lambda: sum_of_squares(gradient)
    yield "pack signs (with its norm)", 24.125, lambda: pack_signs_with_error(m.add_(gradient), packed)
    yield "unpack signs", 4.125, lambda: unpack_signs(packed, 0.5, m)
    for bits in (8, 4):
        yield from message_kernels(gradient.view(1, -1), lp_param.view(1, -1), bits)


def message_kernels(values: Tensor, target: Tensor, bits: int) -> Iterator[tuple[str, float, Callable[[], object]]]:
    """ZeRO++'s kernels for gradients and weights."""
    message, errors = (new_messages(1, values.numel(), kind, values.device) for kind in (bits, 8))
    feedback, parts = Feedback(errors.zero_(), 0.8), message.view(1, 1, -1).repeat(4, 1, 1)
    sent, kept = (each.numel() / values.numel() for each in (message, errors))
    yield f"quantise to {bits} bits", 2 + sent, lambda: write_messages(values, message, bits)
    yield (
        f"quantise to {bits} bits, with error feedback",
        2 + sent + 2 * kept,
        lambda: write_messages(values, message, bits, feedback),
    )
    yield f"dequantise {bits} bits", 2 + sent, lambda: read_messages(message, target, bits)
    yield f"add up four messages of {bits} bits", 2 + 4 * sent, lambda: sum_messages(parts, target, bits)


def run_timings(numel: int, repeats: int, device: str) -> list[dict[str, Any]]:
    """One row per kernel: time, bandwidth, share of this card's copy bandwidth."""
    source, target = (torch.empty(numel, device=device) for _ in range(2))
    copy = 8 * numel / milliseconds(lambda: target.copy_(source), repeats, device) / 1e6
    torch.cuda.empty_cache()
    sys.stdout.write(f"\n{numel:,} elements; copy: {copy:.0f} GB/s (read and write)\n")
    sys.stdout.write(f"{'':58} {'ms':>8} {'GB/s':>7} {'of copy':>8}\n")
    rows = []
    for family in (adam_rivals, other_kernels):
        for name, per_element, call in family(numel, device):
            time_ms = milliseconds(call, repeats, device)
            speed = per_element * numel / time_ms / 1e6
            rows.append({"name": name, "ms": time_ms, "gb_per_s": speed, "of_copy": speed / copy})
            sys.stdout.write(f"{name:58} {time_ms:8.3f} {speed:7.0f} {speed / copy:8.2f}\n")
        torch.cuda.empty_cache()
    return rows


def compared(card: kernel_times.Card | None, numel: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predicted and measured milliseconds of kernels on a known card."""
    if card is None:
        return []
    run = kernel_times.kept()
    found = [(row["name"], 1e3 * numel * kernel_times.timed(run, card, row["name"]), row["ms"]) for row in rows]
    return [{"name": name, "predicted_ms": p, "measured_ms": m, "ratio": m / p} for name, p, m in found]


def show(table: list[dict[str, Any]]) -> None:
    sys.stdout.write(f"\n{'':58} {'predicted':>10} {'measured':>9} {'ratio':>6}\n")
    for row in table:
        numbers = f"{row['predicted_ms']:10.3f} {row['measured_ms']:9.3f} {row['ratio']:6.2f}"
        sys.stdout.write(f"{row['name']:58} {numbers}\n")


def waits_for_the_device(device: str) -> list[str]:
    """Calls in one fused step that block the host; there should be none."""
    vectors = Vectors(*(torch.randn(1 << 16, device=device) for _ in range(2)), tuple(
        torch.zeros(1 << 16, device=device) for _ in range(2)
    ))  # fmt: skip
    scale, flag = torch.tensor(0.5, device=device), torch.zeros(1, device=device)
    adam(vectors, RULE, 1, Applied(scale, flag))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        torch.cuda.synchronize()
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        sum_of_squares(vectors.gradient)
        adam(vectors, RULE, 2, Applied(scale, flag))
    waiting = ("Synchronize", "aten::item", "aten::_local_scalar_dense", "Memcpy DtoH")
    return [
        event.key
        for event in profile.key_averages()
        # The profiler itself synchronizes with the device once, when it ends.
        if any(word in event.key for word in waiting) and (event.key, event.count) != ("cudaDeviceSynchronize", 1)
    ]


def main(arguments: list[str] | None = None) -> None:
    """Check, time, and exit with an error if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 30, help="elements of the timed vectors")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=1, help="parallel check processes (default 1)")
    parser.add_argument("--quick", action="store_true", help="time 2**24 elements")
    parser.add_argument("--json", type=Path, help="output file")
    parser.add_argument("--card", help="GPU to compare with predictions; default: by the device's name")
    parser.add_argument("--dry-run", action="store_true", help="run everything once on the CPU, with tiny sizes")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit(
            "bench.gpu_suite needs a GPU; on a CPU, tests/kernels runs the same checks, and --dry-run tries the suite"
        )
    device = "cpu" if options.dry_run else "cuda"
    name = "dry run on the CPU" if options.dry_run else torch.cuda.get_device_name()
    sys.stdout.write(f"{name}, torch {torch.__version__}\n")
    failed = run_checks(device, options.jobs)
    numel = 1 << 14 if options.dry_run else 1 << 24 if options.quick else options.numel
    rows = run_timings(numel, 1 if options.dry_run else options.repeats, device)
    waits = waits_for_the_device(device)
    sys.stdout.write(f"\nhost waits in a fused step: {', '.join(waits) or 'none'}\n")
    sys.stdout.write("host waits in an engine's step: python -m bench.gpu_programme --block 1\n")
    table = compared(kernel_times.card_of(options.card or name), numel, rows)
    show(table)
    if options.json:
        answer = {"device": name, "torch": torch.__version__, "failed": failed, "rows": rows, "compared": table}
        options.json.write_text(json.dumps({**answer, "waits": waits}, indent=1))
    sys.exit(f"{len(failed)} checks failed" if failed else 0)


if __name__ == "__main__":
    main()
