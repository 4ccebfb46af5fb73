"""Steps on two hosts with a slow link: ZeRO++ against plain stage 3, hybrid sharding and two hops against stage 2,
hybrid stage 3 against FSDP2's.

    python -m bench.slow_links --name 100mbit               # as root: creates two network namespaces, and removes them

Two ranks per host. All ways train in the same processes, alternating round by round; results are ratios within a round.
`tc` (tbf) limits what each host sends; if the kernel has netem, it also delays it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import torch

from bench import hosts
from bench.engines import build_fsdp2_step, ds_config, engine_step
from bench.models import SIZES, build_model

PER_HOST = 2
HPZ, QWZ, QGZ = {"zero_hpz_partition_size": 2}, {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
# Nothing stays gathered between forward and backward, as for a model that needs stage 3.
THREE = {"stage": 3, "stage3_max_live_parameters": 0}
# way -> (zero_optimization, hf_zero)
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 3": (THREE, {}),
    "stage 3, hpZ": ({**THREE, **HPZ}, {}),
    "stage 3, hpZ, qwZ, qgZ": ({**THREE, **HPZ, **QWZ, **QGZ}, {}),
    "stage 2, one hop": ({"stage": 2}, {"hops": 1}),
    "stage 2, two hops": ({"stage": 2}, {"hops": 2}),
    "stage 2, shard_group host": ({"stage": 2}, {"shard_group": "host"}),
    "stage 3, shard_group host": (THREE, {"shard_group": "host"}),
}
HSDP = "FSDP2, HSDP"  # frees whole parameters after forward, as THREE does
AGAINST = {"stage 3": list(WAYS)[1:3], "stage 2, one hop": list(WAYS)[4:6], HSDP: list(WAYS)[6:]}


def play(options: argparse.Namespace) -> None:
    """Run as one rank."""
    import hf_zero
    from hf_zero.comm import background_collectives, ledger

    size = SIZES[options.size]
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    steps = {}
    for way, (zero, own) in WAYS.items():
        config = {**ds_config(zero["stage"], size.batch, "own"), "zero_optimization": zero, "hf_zero": own}
        steps[way] = engine_step(hf_zero.initialize(model=build_model(size), config=config)[0])
    steps[HSDP] = build_fsdp2_step(build_model(size), reshard=True, shard_size=PER_HOST)
    everybody = background_collectives()

    def play_round() -> hosts.Round:
        found = {}
        for way, step in steps.items():
            ids = torch.randint(size.vocabulary, (size.batch, size.length), generator=generator)
            everybody.gather_objects(None)
            ledger.reset()
            started = time.perf_counter()
            step(ids)
            everybody.gather_objects(None)
            found[way] = [time.perf_counter() - started, sum(t.across for t in ledger.tallies.values())]
        return found

    hosts.play_rounds(play_round)


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, "-m", "bench.slow_links", "--job", "ours", "--size", options.size]
    with hosts.joined_hosts(2, options.rate, options.delay) as (spaces, is_delayed):
        with hosts.Job(words, spaces, per_host=PER_HOST, timeout_s=options.timeout) as job:
            rounds = [job.play_round() for _ in range(options.rounds + 1)][1:]  # the first one warms up
    delay = options.delay if is_delayed else "none: this kernel has no netem"
    return {"rate": options.rate, "delay": delay, "rounds": rounds}


def markdown(run: dict[str, Any]) -> str:
    rounds = run["rounds"]
    lines = [
        f"# Two hosts of two ranks, {run['rate']} between them (delay: {run['delay']}), model {run['size']}, bf16",
        "",
        f"{hosts.how(run, 'bench.slow_links')}; {len(rounds)} rounds.",
        "",
        "| way | seconds of a step | MB from the other host, per rank | ratio within a round |",
        "|---|---|---|---|",
    ]
    base = {way: way for way in AGAINST} | {way: base for base, ways in AGAINST.items() for way in ways}
    for way in [*WAYS, HSDP]:
        times = [each[way][0] for each in rounds]
        ratios = [each[way][0] / each[base[way]][0] for each in rounds]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) of {base[way]}"
        megabytes = "not counted" if way == HSDP else f"{rounds[0][way][1] / 1e6:.1f}"
        lines.append(f"| {way} | {statistics.median(times):.2f} | {megabytes} | {ratio} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--delay", default="1ms")
    parser.add_argument("--rounds", type=int, default=2)
    hosts.size_option(parser, "25m-short")
    hosts.main(parser, play, run_all, markdown, "slow-links")


if __name__ == "__main__":
    main()
