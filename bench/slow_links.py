"""Steps on two hosts that a slow link joins: ZeRO++ beside plain stage 3, hybrid sharding and two hops beside stage 2,
hybrid stage 3 beside FSDP2's.

    python -m bench.slow_links --name 100mbit               # as root: makes two network namespaces, and takes them away

Two ranks on each host. All ways are trained side by side in the same processes, round after round; claims are ratios
within a round. `tc` (tbf) limits what each host sends; where the kernel has netem, it also delays it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench.engines import build_fsdp2_step, ds_config, engine_step
from bench.models import SIZES, build_model
from bench.surroundings import ROOT, keep, machine

HOSTS, PER_HOST, PORT = ("10.77.9.1", "10.77.9.2"), 2, 29611
HPZ, QWZ, QGZ = {"zero_hpz_partition_size": 2}, {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
# Nothing stays gathered between forward and backward, as of a model that needs stage 3.
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


@contextlib.contextmanager
def two_hosts(rate: str, delay: str) -> Iterator[tuple[list[str], bool]]:
    """Names of two namespaces with a link between them, and whether it is delayed, too."""
    token = secrets.token_hex(3)
    spaces, ends = [f"hfz-{token}-{side}" for side in "ab"], [f"hfz{token}{side}" for side in "ab"]

    def run(*words: str, check: bool = True) -> int:
        return subprocess.run(words, check=check, stderr=None if check else subprocess.DEVNULL).returncode

    try:
        for space in spaces:
            run("ip", "netns", "add", space)
        run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        is_delayed = True
        for space, end, address in zip(spaces, ends, HOSTS, strict=True):
            run("ip", "link", "set", end, "netns", space, "name", "eth0")
            run("ip", "-n", space, "address", "add", f"{address}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                run("ip", "-n", space, "link", "set", link, "up")
            tc = ["ip", "netns", "exec", space, "tc", "qdisc", "add", "dev", "eth0", "root"]
            if run(*tc, "netem", "delay", delay, "rate", rate, check=False):
                is_delayed = False
                run(*tc, "tbf", "rate", rate, "burst", "256kb", "latency", "200ms")
        yield spaces, is_delayed
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def train(rounds: int, size: str, output: str) -> None:
    """One rank."""
    import hf_zero
    from hf_zero.comm import background_collectives, ledger

    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    steps = {}
    for way, (zero, own) in WAYS.items():
        config = {**ds_config(zero["stage"], SIZES[size].batch, "own"), "zero_optimization": zero, "hf_zero": own}
        steps[way] = engine_step(hf_zero.initialize(model=build_model(SIZES[size]), config=config)[0])
    steps[HSDP] = build_fsdp2_step(build_model(SIZES[size]), reshard=True, shard_size=PER_HOST)
    everybody = background_collectives()
    shape = (SIZES[size].batch, SIZES[size].length)
    found: list[dict[str, list[float]]] = []
    for _ in range(rounds + 1):
        found.append({})
        for way, step in steps.items():
            ids = torch.randint(SIZES[size].vocabulary, shape, generator=generator)
            everybody.gather_objects(None)
            ledger.reset()
            started = time.perf_counter()
            step(ids)
            everybody.gather_objects(None)
            found[-1][way] = [time.perf_counter() - started, sum(t.across for t in ledger.tallies.values())]
    if os.environ["RANK"] == "0":
        Path(output).write_text(json.dumps(found[1:]), encoding="utf-8")  # the first round warms up


def run_ranks(spaces: list[str], per_host: int, words: list[str], timeout: float) -> None:
    """Run `words` as one rank of a job, `per_host` times in each of these namespaces, and wait for all."""
    ranks = []
    for rank in range(per_host * len(spaces)):
        host, local = divmod(rank, per_host)
        own: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": per_host * len(spaces)}
        own |= {"MASTER_ADDR": HOSTS[0], "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}
        script = f"hostname host-{host} && exec {' '.join(words)}"
        command = ["ip", "netns", "exec", spaces[host], "unshare", "--uts", "sh", "-c", script]
        environment = {**os.environ, **{key: str(value) for key, value in own.items()}}
        ranks.append(subprocess.Popen(command, env=environment, cwd=ROOT))
    try:
        codes = [rank.wait(timeout=timeout) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    with two_hosts(options.rate, options.delay) as (spaces, is_delayed), tempfile.TemporaryDirectory() as folder:
        output = f"{folder}/found.json"
        words = [sys.executable, "-m", "bench.slow_links", "--output", output]
        words += ["--rounds", str(options.rounds), "--size", options.size]
        run_ranks(spaces, PER_HOST, words, options.timeout)
        rounds = json.loads(Path(output).read_text(encoding="utf-8"))
    versions = {"torch": torch.__version__}
    facts = {"rate": options.rate, "delay": options.delay if is_delayed else "none: this kernel has no netem"}
    facts |= {"size": options.size, "rounds": rounds, "versions": versions, "machine": machine()}
    return {"date": datetime.datetime.now().isoformat(timespec="minutes"), "command": sys.argv[1:], **facts}


def markdown(run: dict[str, Any]) -> str:
    rounds = run["rounds"]
    lines = [
        f"# Two hosts of two ranks, {run['rate']} between them (delay: {run['delay']}), model {run['size']}, bf16",
        "",
        f"`python -m bench.slow_links {' '.join(run['command'])}`, {run['date']}, torch {run['versions']['torch']}, "
        f"{run['machine']['cores']} cores, load {run['machine']['load_1min']} at the end; {len(rounds)} rounds.",
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
    parser.add_argument("--size", default="25m-short", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600)
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
        keep(run, text, f"slow-links-{options.name}")


if __name__ == "__main__":
    main()
