"""How much of the traffic between two hosts hides behind compute.

    python -m bench.overlap --name 25m                      # as root: makes two network namespaces, and takes them away

One rank on each host. The link is made as fast as is needed for stage 3's traffic to take as long as compute alone,
and three times and a third as long. In every round each rank runs, one after the other: compute alone, the link alone,
and steps of hf_zero and FSDP2. With c and l the seconds of the first two, and t those of a step:

    hidden = (c + l - t) / min(c, l)        1: all of the shorter one; 0: nothing; below 0: the step has own costs
    step over its floor = t / max(c, l)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.engines import build_compute_step, build_fsdp2_step, ds_config, engine_step
from bench.models import SIZES, build_model
from bench.slow_links import run_ranks, two_hosts
from bench.surroundings import keep, machine

# Nothing stays gathered between forward and backward, as of a model that needs stage 3.
STAGES: dict[str, dict[str, Any]] = {
    "hf_zero stage 3": {"stage": 3, "stage3_max_live_parameters": 0},
    "hf_zero stage 2": {"stage": 2},
}
FSDP2 = "FSDP2, resharding"
# way -> how often half of the 16-bit weights crosses the link in each direction
PASSES = {"hf_zero stage 3": 3, FSDP2: 3, "hf_zero stage 2": 2}
BITS = 16


def compute_step(size: str) -> Callable[[torch.Tensor], object]:
    """Forward and backward of the whole model, and the update of one rank's half."""
    model = build_model(SIZES[size])
    numel = sum(parameter.numel() for parameter in model.parameters()) // 2
    run = build_compute_step(model)
    masters = torch.nn.Parameter(torch.zeros(numel))
    optimizer = torch.optim.AdamW([masters], fused=True)

    def step(ids: torch.Tensor) -> None:
        run(ids)
        masters.grad = torch.zeros_like(masters)
        optimizer.step()

    return step


def link_step(size: str, num_passes: int) -> Callable[[torch.Tensor], object]:
    """The bytes of a step and nothing else: gathers of weights, and one reduction."""
    from hf_zero.comm import Channel, collectives_for

    collectives = collectives_for(torch.device("cpu"), Channel.ACCESS)
    numel = sum(parameter.numel() for parameter in build_model(SIZES[size]).parameters()) // 2 * 2
    flat, shard = torch.zeros(numel, dtype=torch.bfloat16), torch.zeros(numel // 2, dtype=torch.bfloat16)

    def step(_ids: torch.Tensor) -> None:
        under_way = [collectives.all_gather(flat) for _ in range(num_passes - 1)]
        under_way.append(collectives.reduce_scatter(shard, flat.clone()))
        for pending in under_way:
            pending.wait()

    return step


def train(rounds: int, size: str, output: str) -> None:
    """One rank."""
    import hf_zero
    from hf_zero.comm import background_collectives

    hf_zero.init_distributed("gloo")
    steps: dict[str, Callable[[torch.Tensor], object]] = {"compute": compute_step(size)}
    for num_passes in sorted(set(PASSES.values())):
        steps[f"link {num_passes}"] = link_step(size, num_passes)
    for way, zero in STAGES.items():
        config = {**ds_config(zero["stage"], SIZES[size].batch, "own"), "zero_optimization": zero}
        steps[way] = engine_step(hf_zero.initialize(model=build_model(SIZES[size]), config=config)[0])
    steps[FSDP2] = build_fsdp2_step(build_model(SIZES[size]), reshard=True)
    everybody = background_collectives()
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    shape = (SIZES[size].batch, SIZES[size].length)
    found: list[dict[str, float]] = []
    for _ in range(rounds + 2):
        found.append({})
        for way, step in steps.items():
            times = []
            for _ in range(3):
                ids = torch.randint(SIZES[size].vocabulary, shape, generator=generator)
                everybody.gather_objects(None)
                started = time.perf_counter()
                step(ids)
                everybody.gather_objects(None)
                times.append(time.perf_counter() - started)
            found[-1][way] = statistics.median(times)
    if os.environ["RANK"] == "0":
        Path(output).write_text(json.dumps(found[2:]), encoding="utf-8")  # the first rounds warm up, and make plans


def shares(times: dict[str, float], way: str) -> tuple[float, float]:
    """Of one round: how much was hidden, and the step over its floor."""
    compute, link, step = times["compute"], times[f"link {PASSES[way]}"], times[way]
    return (compute + link - step) / min(compute, link), step / max(compute, link)


def run_at(rate_mbit: int, options: argparse.Namespace, rounds: int) -> list[dict[str, float]]:
    with two_hosts(f"{rate_mbit}mbit", "0ms") as (spaces, _), tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/found.json"
        words = [sys.executable, "-m", "bench.overlap", "--output", output, "--rounds", str(rounds)]
        run_ranks(spaces, 1, [*words, "--size", options.size], options.timeout)
        found: list[dict[str, float]] = json.loads(Path(output).read_text(encoding="utf-8"))
        return found


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    numel = sum(parameter.numel() for parameter in build_model(SIZES[options.size]).parameters())
    compute = run_at(10_000, options, 1)[0]["compute"]
    shapes = {}
    for name, ratio in (("as long as", 1.0), ("three times as long as", 3.0), ("a third as long as", 1 / 3)):
        rate = round(3 * numel / 2 * BITS / (ratio * compute) / 1e6)
        shapes[name] = {"rate_mbit": rate, "rounds": run_at(rate, options, options.rounds)}
    facts = {"size": options.size, "shapes": shapes, "versions": {"torch": torch.__version__}, "machine": machine()}
    return {"date": datetime.datetime.now().isoformat(timespec="minutes"), "command": sys.argv[1:], **facts}


def markdown(run: dict[str, Any]) -> str:
    lines = [
        f"# Two hosts of one rank: traffic that hides behind compute, model {run['size']}, bf16",
        "",
        f"`python -m bench.overlap {' '.join(run['command'])}`, {run['date']}, torch {run['versions']['torch']}, "
        f"{run['machine']['cores']} cores, load {run['machine']['load_1min']} at the end. Medians over rounds, with "
        "the least and the most; hidden = (compute + link - step) / shorter one, floor = the longer one.",
        "",
        "| stage 3's traffic takes | way | compute s | link s | step s | hidden | step / floor | step / FSDP2's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, shape in run["shapes"].items():
        rounds = shape["rounds"]
        for way in PASSES:
            keys = ("compute", f"link {PASSES[way]}", way)
            middle = [statistics.median(each[key] for each in rounds) for key in keys]
            hidden, floor = zip(*(shares(each, way) for each in rounds), strict=True)
            spread = [
                f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"
                for values in (hidden, floor, [each[way] / each[FSDP2] for each in rounds])
            ]
            link = f"{name} compute, {shape['rate_mbit']} Mbit/s"
            cells = [link, way, *(f"{value:.2f}" for value in middle), *spread]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="25m", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900)
    parser.add_argument("--name")
    parser.add_argument("--output", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.output:
        train(options.rounds, options.size, options.output)
        return
    run = run_all(options)
    text = markdown(run)
    sys.stdout.write(text)
    if options.name:
        keep(run, text, f"overlap-{options.name}")


if __name__ == "__main__":
    main()
