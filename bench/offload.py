"""Trains a model from a drive within a memory limit that stops the same run without offload.

python -m bench.offload --folder /mnt/nvme --name big
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import timeline
from bench.surroundings import ROOT, about, keep

SLACK = 1.15  # the target: buffers, one unit, and 15%
log = logging.getLogger("bench")


def main() -> None:
    """Run both, write JSON and Markdown."""
    arguments = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run = {
        **about("bench.offload"),
        "limit_gb": arguments.limit_gb,
        "sub_group": arguments.sub_group,
        "offloaded": _measure(arguments, ["--folder", arguments.folder]),
        "in_memory": _measure(arguments, []),
    }
    text = report(run)
    keep(run, text, f"offload-{arguments.name}", arguments.results)
    log.info("%s\nwritten to %s", text, arguments.results)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="folder on the drive")
    parser.add_argument("--shape", default="1b", help="name in bench/offload_worker.py")
    parser.add_argument("--sub-group", type=int, default=10_000_000)
    parser.add_argument("--limit-gb", type=float, default=5.0, help="limit of private memory for both runs")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="1b", help="part of the result files' names")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    return parser.parse_args()


def _measure(arguments: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = Path(folder) / "result"
        command = [
            sys.executable,
            "-m",
            "bench.offload_worker",
            "--shape",
            arguments.shape,
            "--out",
            str(out),
            *options,
        ]
        command += ["--sub-group", str(arguments.sub_group), "--threads", str(arguments.threads)]
        command += ["--limit-gb", str(arguments.limit_gb)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "HF_HUB_OFFLINE": "1"}
        ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if not out.exists():
            return {"failed": f"exit {ended.returncode}: {ended.stderr.strip().splitlines()[-1][:200]}"}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def report(run: dict[str, Any]) -> str:
    """The report in Markdown."""
    place, result = run["machine"], run["offloaded"]
    lines = [
        "# A model that does not fit",
        "",
        f"{run['date']} · {place['cpu']}, {place['cores']} cores, {place['memory_gib']} GiB, load "
        f"{place['load_1min']} at the end · Python {place['python']}",
        "",
        f"`{run['command']}`: stage 3, one rank, bf16, AdamW, gradient checkpointing; both runs may have "
        f"{run['limit_gb']:g} GB of private memory (ulimit -d).",
        "",
        f"- Without offload: {run['in_memory'].get('failed', 'completed')}",
    ]
    if "failed" in result:
        return "\n".join([*lines, f"- From the drive: {result['failed']}"]) + "\n"
    allowed = result["allowance_mb"]
    promised = SLACK * (allowed["buffers"] + allowed["unit"] + allowed["persistent"])
    peak = result["steps_peak_mb"] - result["after_imports_mb"]
    init_peak = result["init_peak_mb"] - result["after_imports_mb"]
    verdict = "met" if peak <= promised else f"missed by {peak - promised:.0f} MB"
    state_gb = result["numel"] * 16 / 1e9
    lines += [
        f"- From the drive: {result['numel'] / 1e9:.2f} billion parameters, whose weights, gradients, masters and "
        f"states are {state_gb:.1f} GB, trained with a peak of {peak:.0f} MB above the imports "
        f"({result['after_imports_mb']:.0f} MB); while the model was made, {init_peak:.0f} MB",
        f"- Promise: buffers {allowed['buffers']:.0f} MB + one unit {allowed['unit']:.0f} MB + 15% = {promised:.0f} "
        f"MB: {verdict}",
        "",
        "| step | loss | forward s | backward s | update s | of it waiting | read + written GB | GB/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number, step in enumerate(result["steps"], 1):
        update = step["update"]
        moved = (update["bytes_read"] + update["bytes_written"]) / 1e9
        lines.append(
            f"| {number} | {step['loss']:.3f} | {step['forward_s']:.1f} | {step['backward_s']:.1f} | "
            f"{step['update_s']:.1f} | {update['waited_s']:.1f} | {moved:.1f} | {update['gb_per_s']:.2f} |"
        )
    shares = timeline.overlap(result["timeline"])
    lines += [
        "",
        f"The last update, {len(result['timeline'])} portions of {run['sub_group'] / 1e6:g} million elements: for "
        f"{shares['drive']:.0%} of its time the drive is at work; computing takes {shares['compute']:.0%}, of which "
        f"{shares['hidden']:.0%} runs while the drive works. From its middle, as measured:",
        "",
        "```",
        *timeline.draw(result["timeline"]),
        "```",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
