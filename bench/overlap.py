"""How much of the traffic between hosts is hidden behind compute.

    python -m bench.overlap --name 25m                      # as root: creates network namespaces, and removes them
    python -m bench.overlap --hosts 4 --oracle-python .oracle/bin/python --name 25m-four-hosts

One rank per host. The micro-batch is as large as needed for stage 3's traffic to take as long as compute alone, three
times as long, and a third as long, at a rate that one machine's processors can carry while they compute; only if one
sample computes for too long is the rate lowered instead. In every round each rank runs, one after the other: compute
alone, the link alone, and steps of hf_zero and FSDP2. Then DeepSpeed's ranks, which are other processes, run theirs
while the first ones sleep. Compute and link at once, without waiting for each other, show the best possible schedule if
the processors that compute also carry the bytes. With c, l and t the seconds of the first two and of a step:

    hidden = (c + l - t) / min(c, l)        1: all of the shorter one; 0: nothing; below 0: the step has overhead
    step over its floor = t / max(c, l)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bench import hosts
from bench.engines import DTYPES, build_compute_step, build_ds_step, build_fsdp2_step, ds_config, engine_step
from bench.models import SIZES, Size, build_model

OURS, LEANEST, FSDP2 = "hf_zero stage 3", "hf_zero stage 3, at most one unit ahead", "FSDP2, resharding"
INDEPENDENT = "compute and stage 3's bytes, neither waiting for the other"
# way -> how many times a rank receives the other hosts' part of the weights
PASSES = {
    **dict.fromkeys((INDEPENDENT, OURS, LEANEST, FSDP2, "DeepSpeed stage 3"), 3),
    **dict.fromkeys(("hf_zero stage 2", "DeepSpeed stage 2"), 2),
}
TRIED = (1, 4)  # measured micro-batches, from which the compute time of others is extrapolated
RATIOS = {"as-long": 1.0, "three-times-as-long": 3.0, "a-third-as-long": 1 / 3}
Step = Callable[[torch.Tensor], object]


def sharded(size: Size) -> dict[str, Any]:
    """As for a model that needs stage 3, for both engines: forward's units are released, except those that backward
    starts with, and two blocks may be in flight."""
    block = size.hidden * (4 * size.hidden + 3 * size.intermediate)
    return {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 2 * block}


def compute_step(size: Size, precision: str, num_ranks: int) -> Step:
    """Forward and backward of the whole model, and the update of one rank's part."""
    model = build_model(size)
    numel = sum(parameter.numel() for parameter in model.parameters()) // num_ranks
    run = build_compute_step(model, DTYPES[precision])
    masters = torch.nn.Parameter(torch.zeros(numel))
    optimizer = torch.optim.AdamW([masters], fused=True)

    def step(ids: torch.Tensor) -> None:
        run(ids)
        masters.grad = torch.zeros_like(masters)
        optimizer.step()

    return step


def link_step(size: Size, precision: str, num_ranks: int, num_passes: int) -> Step:
    """Only the communication of a step: gathers of weights, and one reduction."""
    from hf_zero.comm import Channel, collectives_for

    collectives = collectives_for(torch.device("cpu"), Channel.ACCESS)
    numel = sum(parameter.numel() for parameter in build_model(size).parameters()) // num_ranks
    flat, shard = (torch.zeros(n * numel, dtype=DTYPES[precision]) for n in (num_ranks, 1))

    def step(_ids: torch.Tensor) -> None:
        under_way = [collectives.all_gather(flat) for _ in range(num_passes - 1)]
        under_way.append(collectives.reduce_scatter(shard, flat.clone()))
        for pending in under_way:
            pending.wait()

    return step


def independent_step(size: Size, precision: str, num_ranks: int) -> Step:
    """Both at once: all communication is started before compute begins, and waited for after compute ends."""
    compute = compute_step(size, precision, num_ranks)
    send = link_step(size, precision, num_ranks, PASSES[INDEPENDENT])

    def step(ids: torch.Tensor) -> None:
        sending = threading.Thread(target=send, args=(ids,))
        sending.start()
        compute(ids)
        sending.join()

    return step


def our_steps(size: Size, precision: str) -> dict[str, Step]:
    import hf_zero

    hf_zero.init_distributed("gloo")
    num_ranks = dist.get_world_size()
    steps: dict[str, Step] = {"compute": compute_step(size, precision, num_ranks)}
    for num_passes in sorted(set(PASSES.values())):
        steps[f"link {num_passes}"] = link_step(size, precision, num_ranks, num_passes)
    steps[INDEPENDENT] = independent_step(size, precision, num_ranks)
    leanest = {"stage": 3, "stage3_max_live_parameters": 0}
    for way, zero in {OURS: sharded(size), LEANEST: leanest, "hf_zero stage 2": {"stage": 2}}.items():
        config = ds_config(zero["stage"], size.batch, "own", precision=precision) | {"zero_optimization": zero}
        steps[way] = engine_step(hf_zero.initialize(model=build_model(size), config=config)[0])
    steps[FSDP2] = build_fsdp2_step(build_model(size), reshard=True, dtype=DTYPES[precision])
    return steps


def deepspeed_steps(size: Size, precision: str) -> dict[str, Step]:
    def build(zero: dict[str, Any]) -> Step:
        config = ds_config(0, size.batch, "native", precision=precision)
        return build_ds_step(build_model(size), {**config, "zero_optimization": zero})

    return {"DeepSpeed stage 3": build(sharded(size)), "DeepSpeed stage 2": build({"stage": 2})}


def alone(size: Size, precision: str) -> dict[str, Step]:
    dist.init_process_group("gloo")
    return {"compute": compute_step(size, precision, dist.get_world_size())}


JOBS = {"ours": our_steps, "deepspeed": deepspeed_steps, "alone": alone}


def play(options: argparse.Namespace) -> None:
    """Run as one rank."""
    size = replace(SIZES[options.size], batch=options.batch)
    steps = JOBS[options.job](size, options.precision)
    everybody = dist.new_group(backend="gloo")
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))

    def play_round() -> hosts.Round:
        return {way: statistics.median(seconds(step) for _ in range(3)) for way, step in steps.items()}

    def seconds(step: Step) -> float:
        ids = torch.randint(size.vocabulary, (size.batch, size.length), generator=generator)
        dist.barrier(everybody)
        started = time.perf_counter()
        step(ids)
        dist.barrier(everybody)
        return time.perf_counter() - started

    hosts.play_rounds(play_round)


def play_all(
    options: argparse.Namespace, jobs: dict[str, str], rate_mbit: float, batch: int, rounds: int
) -> list[hosts.Round]:
    """Plays `rounds` rounds of each job (`jobs` are interpreters), one after the other, at this rate."""
    with contextlib.ExitStack() as stack:
        spaces, _ = stack.enter_context(hosts.joined_hosts(options.hosts, f"{rate_mbit:.0f}mbit", "0ms"))
        running = []
        for number, (job, python) in enumerate(jobs.items()):
            words = [python, "-m", "bench.overlap", "--job", job, "--size", options.size, "--batch", str(batch)]
            words += ["--precision", options.precision]
            running.append(
                stack.enter_context(hosts.Job(words, spaces, port=29611 + number, timeout_s=options.timeout))
            )
        found: list[hosts.Round] = []
        for _ in range(rounds + 2):
            found.append({})
            for each in running:
                found[-1] |= each.play_round()
        return found[2:]  # the first rounds warm up and create plans


def fit(ratio: float, bits: float, rate: float, compute: Callable[[float], float]) -> tuple[int, float]:
    """(micro-batch, bits per second) with which `bits` take `ratio` times as long as compute; at most `rate`.

    Args:
        compute: seconds of a micro-batch, by its size.
    """
    batch = 1
    while compute(batch + 0.5) < bits / rate / ratio:
        batch += 1
    return batch, min(rate, bits / (ratio * compute(batch))) if batch == 1 else rate


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    numel = sum(parameter.numel() for parameter in build_model(SIZES[options.size]).parameters())
    tried = [
        min(each["compute"] for each in play_all(options, {"alone": sys.executable}, options.rate_mbit, batch, 3))
        for batch in TRIED
    ]
    per_sample = (tried[1] - tried[0]) / (TRIED[1] - TRIED[0])
    bits = PASSES[OURS] * 8 * DTYPES[options.precision].itemsize * numel * (options.hosts - 1) / options.hosts
    jobs = {"ours": sys.executable} | ({"deepspeed": options.oracle_python} if options.oracle_python else {})
    shapes = {}
    for name in options.traffic:
        batch, rate = fit(
            RATIOS[name], bits, 1e6 * options.rate_mbit, lambda size: tried[0] + (size - TRIED[0]) * per_sample
        )
        rounds = play_all(options, jobs, rate / 1e6, batch, options.rounds)
        shapes[name] = {"rate_mbit": round(rate / 1e6), "batch": batch, "rounds": rounds}
    return {
        "hosts": options.hosts,
        "precision": options.precision,
        "shapes": shapes,
        "tried": dict(zip(map(str, TRIED), tried)),
    }


def shares(times: hosts.Round, way: str) -> tuple[float, float]:
    """Of one round: the hidden share, and the step time over its lower bound."""
    compute, link, step = times["compute"], times[f"link {PASSES[way]}"], times[way]
    return (compute + link - step) / min(compute, link), step / max(compute, link)


def markdown(run: dict[str, Any]) -> str:
    lines = [
        f"# {run['hosts']} hosts of one rank: traffic that hides behind compute, model {run['size']}, "
        f"{run['precision']}",
        "",
        f"{hosts.how(run, 'bench.overlap')}. Medians over rounds, with the least and the most; hidden = (compute + "
        "link - step) / shorter one, floor = the longer one.",
        "",
        "| stage 3's traffic takes | way | compute s | link s | step s | hidden | step / floor | step / FSDP2's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, shape in run["shapes"].items():
        rounds = shape["rounds"]
        for way in (way for way in PASSES if way in rounds[0]):
            keys = ("compute", f"link {PASSES[way]}", way)
            middle = [statistics.median(each[key] for each in rounds) for key in keys]
            hidden, floor = zip(*(shares(each, way) for each in rounds), strict=True)
            spread = [
                f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"
                for values in (hidden, floor, [each[way] / each[FSDP2] for each in rounds])
            ]
            link = f"{name.replace('-', ' ')} as compute: {shape['batch']} samples, {shape['rate_mbit']} Mbit/s"
            cells = [link, way, *(f"{value:.2f}" for value in middle), *spread]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    hosts.size_option(parser, "25m")
    parser.add_argument("--hosts", type=int, default=2, help="2 at least")
    parser.add_argument("--rate-mbit", type=float, default=1000, help="maximum rate of every link, in each direction")
    parser.add_argument("--traffic", nargs="+", choices=RATIOS, default=list(RATIOS), help="relative traffic")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=DTYPES, default="bf16", help="fp32 for processors without bf16")
    parser.add_argument("--oracle-python", help="interpreter with real DeepSpeed; default: skip DeepSpeed")
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    hosts.main(parser, play, run_all, markdown, "overlap")


if __name__ == "__main__":
    main()
