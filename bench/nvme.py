"""An update from a drive, against the drive's own speed: the same threads, blocks and files without an update.

python -m bench.nvme --folder /mnt/nvme
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import hf_zero
from bench.surroundings import ROOT, about, keep
from hf_zero.config import Aio
from hf_zero.device.host_memory import host_empty
from hf_zero.offload.swap_store import Drive

WIDTH = 4096
log = logging.getLogger("bench")


def main() -> None:
    """Measure in turn for several rounds, then write JSON and Markdown."""
    arguments = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(arguments.threads)
    rounds = [{**_drive_alone(arguments), "update": _update(arguments)} for _ in range(arguments.rounds)]
    run = {
        **about("bench.nvme"),
        "settings": {"block": arguments.block, "depth": arguments.depth, "threads": arguments.threads},
        "rounds": rounds,
        "fio": _fio(arguments),
    }
    text = report(run)
    keep(run, text, f"nvme-{arguments.name}", arguments.results)
    log.info("%s\nwritten to %s", text, arguments.results)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="folder on the drive")
    parser.add_argument("--millions", type=int, default=200, help="parameters")
    parser.add_argument("--sub-group", type=int, default=8_000_000)
    parser.add_argument("--block", type=int, default=1 << 20)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2, help="threads of the update")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", default="update", help="part of the result files' names")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    return parser.parse_args()


def _drive_alone(arguments: argparse.Namespace) -> dict[str, float]:
    """GB/s of reads, of writes, and of both at once, with all requests in flight and no other work."""
    policy = Aio(block_size=arguments.block, queue_depth=arguments.depth)
    drive = Drive(arguments.folder, policy)
    size, buffers = 64 << 20, [host_empty(64 << 20, torch.uint8) for _ in range(4)]
    file, places = drive.file("alone"), range(24)
    starts = [file.allocate(size) for _ in places]

    def move(verbs: list[str]) -> float:
        started, pending = time.perf_counter(), []
        for place in places:
            act = file.read if verbs[place % len(verbs)] == "read" else file.write
            if len(pending) >= len(buffers):
                pending.pop(0).end()
            pending.append(act(starts[place], buffers[place % len(buffers)]))
        for completion in pending:
            completion.end()
        return size * len(places) / (time.perf_counter() - started) / 1e9

    move(["write"])  # blocks that were never written are slower
    found = {"write": move(["write"]), "read": move(["read"]), "both": move(["read", "write"])}
    drive.close()
    return found


def _update(arguments: argparse.Namespace) -> dict[str, float]:
    """GB/s of one Adam update whose masters, states and gradients are in files."""
    layers = max(1, arguments.millions * 1_000_000 // WIDTH**2)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    place = {"device": "nvme", "nvme_path": arguments.folder, "fast_init": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2, "sub_group_size": arguments.sub_group, "offload_optimizer": place},
        "aio": {"block_size": arguments.block, "queue_depth": arguments.depth},
    }
    engine, *_ = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)
    [drive] = engine.gradients.assembly.placements.drives
    for _ in range(2):  # the first step writes blocks for the first time
        engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)).float().square().mean())
        drive_traffic = drive.requests.traffic
        before = (drive_traffic.bytes_read, drive_traffic.bytes_written, drive_traffic.waited_s)
        started = time.perf_counter()
        engine.step()
        engine.optimizer.updater.stager.flush()
        seconds = time.perf_counter() - started
    read, written = drive_traffic.bytes_read - before[0], drive_traffic.bytes_written - before[1]
    waited = drive_traffic.waited_s - before[2]
    engine.destroy()
    moved = (read + written) / 1e9
    return {"seconds": seconds, "waited_s": waited, "gb": moved, "gb_per_s": moved / seconds}


def _fio(arguments: argparse.Namespace) -> dict[str, float] | None:
    """fio's own measurement, if installed: GB/s of sequential direct reads and writes."""
    if shutil.which("fio") is None:
        return None
    found = {}
    for verb in ("write", "read"):
        command = ["fio", "--name=hf_zero", f"--rw={verb}", "--direct=1", "--ioengine=psync", "--size=256m", "--thread"]
        command += [f"--bs={arguments.block}", f"--numjobs={arguments.depth}", "--group_reporting"]
        command += [f"--directory={arguments.folder}", "--output-format=json", "--unlink=1"]
        answer = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        found[verb] = answer["jobs"][0][verb]["bw_bytes"] / 1e9
    return found


def report(run: dict[str, Any]) -> str:
    """The report in Markdown."""
    place, rounds = run["machine"], run["rounds"]
    alone = {verb: median(one[verb] for one in rounds) for verb in ("read", "write", "both")}
    shares = sorted(one["update"]["gb_per_s"] / one["both"] for one in rounds)
    waiting = sorted(one["update"]["waited_s"] / one["update"]["seconds"] for one in rounds)
    is_met = median(shares) >= 0.85 or median(waiting) <= 0.15
    update = {key: median(one["update"][key] for one in rounds) for key in rounds[0]["update"]}
    fio = run["fio"] and ", ".join(f"{verb} {speed:.2f} GB/s" for verb, speed in run["fio"].items())
    return "\n".join(
        [
            "# An update from a drive",
            "",
            f"{run['date']} · {place['cpu']}, {place['cores']} cores, {place['memory_gib']} GiB, load "
            f"{place['load_1min']} at the end · Python {place['python']}, torch {run['versions']['torch']}",
            "",
            f"`{run['command']}`: {len(rounds)} alternating rounds, medians (min-max); blocks of "
            f"{run['settings']['block']} bytes, {run['settings']['depth']} in flight, {run['settings']['threads']} "
            "threads for the update.",
            "",
            f"- The drive alone: reads {alone['read']:.2f}, writes {alone['write']:.2f}, both at once "
            f"{alone['both']:.2f} GB/s. fio: {fio or 'not installed'}.",
            f"- The update: {update['gb']:.1f} GB read and written in {update['seconds']:.2f} s, "
            f"{update['gb_per_s']:.2f} GB/s: {median(shares):.2f} ({shares[0]:.2f}-{shares[-1]:.2f}) of the drive "
            "alone.",
            f"- Of the update's time {median(waiting):.0%} ({waiting[0]:.0%}-{waiting[-1]:.0%}) is waiting for the "
            "drive; the rest computes while the drive works.",
            f"- Promise (85% of the drive, or bound by computing and overlapped): {'met' if is_met else 'missed'}.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
