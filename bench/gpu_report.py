"""Writes stored GPU measurements as a section of docs/performance.md.

    python -m bench.gpu_report              # print the section
    python -m bench.gpu_report --write      # write it into the page

Two kinds of results: sessions of benches on a GPU (`*-gpu-*.json`, the newest), and blocks of the GPU programme
(`*-programme-*.json`, the newest of each block).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.gpu_programme import MISS, NOT_HERE
from bench.surroundings import RESULTS, ROOT, page_with

PAGE = ROOT / "docs" / "performance.md"
COMMAND = "python -m bench.gpu_report --write"
OURS = "hf_zero 3"
TITLES = {1: "Over NCCL", 2: "What offload costs", 3: "The largest model", 4: "What the host costs"}


def kept(folder: Path = RESULTS) -> dict[str, Any]:
    run: dict[str, Any] = json.loads(sorted(folder.glob("*-gpu-*.json"))[-1].read_text(encoding="utf-8"))
    return run


def training(run: dict[str, Any]) -> Iterator[str]:
    """Whole steps; ratios are relative to hf_zero at stage 3 in the same session."""
    yield "| session | engine, stage | s per step | relative to hf_zero 3 | tokens/s | GPU busy | peak, GB |"
    yield "|" + " --- |" * 7
    for number, session in enumerate(run["sessions"], 1):
        rows = [row for row in session.get("train", []) if "s_per_step" in row]
        base = next((row["s_per_step"] for row in rows if row["case"] == OURS), None)
        for row in sorted(rows, key=lambda each: float(each["s_per_step"])):
            times, ours = row["s_of_steps"], row["case"].startswith("hf_zero")
            name = f"**{row['case']}**" if ours else row["case"]
            busy = row["profile"]["busy"]["kernels"]
            # In the first session named ranges counted as kernels of hf_zero.
            share = f"{busy:.2f}" if not (ours and number == 1) else "–"
            ratio = f"{row['s_per_step'] / base:.2f}" if base else "–"
            yield (
                f"| {number} | {name} | {row['s_per_step']:.3f} ({min(times):.3f} to {max(times):.3f}) | {ratio} | "
                f"{row['tokens_per_s']:,.0f} | {share} | {row['peak_gb']:.1f} |"
            )


def kernels(run: dict[str, Any]) -> Iterator[str]:
    """Times relative to the card's copy bandwidth and the lower bounds of `bench.kernel_times`."""
    suite = next(session["suite"] for session in run["sessions"] if "suite" in session)
    bounds = {row["name"]: row for row in suite["compared"]}
    yield "| kernel | ms | of the card's copy bandwidth | predicted at least, ms | measured by predicted |"
    yield "| --- | --- | --- | --- | --- |"
    for row in suite["rows"]:
        bound = bounds[row["name"]]
        cells = f"{row['ms']:.2f} | {row['of_copy']:.2f} | {bound['predicted_ms']:.2f} | {bound['ratio']:.2f}"
        yield f"| {row['name']} | {cells} |"


def parity(run: dict[str, Any]) -> list[str]:
    """Sentences about whole steps compared with plain PyTorch, and about host synchronization."""
    (rows,) = [session["parity"]["rows"] for session in run["sessions"] if "parity" in session]
    waits = next(session["waits"]["rows"] for session in run["sessions"] if "waits" in session)
    engines = [row for row in rows if "losses" in row and "same_losses" in row]
    compared = [row for row in engines if "difference" in row]
    most = {
        precision: max(row["difference"] for row in compared if row["precision"] == precision)
        for precision in ("fp32", "bf16", "fp16")
    }
    on_device = [row for row in engines if not any(word in row["case"] for word in ("host", "drive", "streaming"))]
    equal = sum(row["same_losses"] and row["same_weights"] for row in on_device)
    differences = ", ".join(f"{value:.1e} in {precision}" for precision, value in most.items())
    alarmed = sum(bool(row["alarm"]) for row in waits)
    shared = next(session["shared"] for session in run["sessions"] if "shared" in session)
    apart = max(row["difference"] for row in shared["rows"])
    return [
        f"- **As plain PyTorch on the same GPU.** {len(compared)} engines (stages 0 to 3; states and weights on the",
        f"  device, on the host, on a drive, streamed) differ in a loss by {differences}, relative, at most. Of",
        f"  {len(on_device)} that keep all on the device {equal} have the losses and weights of stage 0, or of the",
        "  stage that comes first with another optimizer, to the bit. An update on the host differs from one on the",
        "  GPU in last bits.",
        f"- **Ranks that share the GPU**, {shared['ranks']} of them over gloo: {len(shared['rows'])} engines (stages 0",
        f"  to 3, offload) differ from one rank of plain PyTorch by {apart:.1e} at most.",
        f"- **The host waits** for the GPU within a step in {alarmed} of {len(waits)} engines, by torch's sync debug",
        "  mode.",
    ]


def predictions(run: dict[str, Any]) -> Iterator[str]:
    """`plan` compared with measurements of transformers' models."""
    from bench.gpu_predictions import RUNS, predict

    by_name = {run.name: run for run in RUNS}
    yield "| run | tensors, GB | `plan`, before | | taken from the driver, GB | s per step | `plan`, before | now |"
    yield "|" + " --- |" * 8
    for session in run["sessions"]:
        for row in session.get("predictions", {}).get("rows", []):
            before, now = session["predicted"][row["run"]], predict(by_name[row["run"]], "h100", 128)
            off = before["total"] / row["allocated"] - 1
            sizes = (
                f"{row['allocated'] / 1e9:.1f} | {before['total'] / 1e9:.1f} | {off:+.1%} | {row['driver'] / 1e9:.1f}"
            )
            times = f"{row['s_per_step']:.2f} | {before['seconds']:.2f} | {now['seconds']:.2f}"
            yield f"| {row['run']} | {sizes} | {times} |"


def programme(folder: Path = RESULTS) -> Iterator[str]:
    """The newest result of each block of the GPU programme: figures, and what is known of all that was not as
    expected."""
    runs = [(file, json.loads(file.read_text(encoding="utf-8"))) for file in sorted(folder.glob("*-programme-*.json"))]
    for _, (file, run) in sorted({run["block"]: (file, run) for file, run in runs}.items()):
        rows = [row for row in run["rows"] if row["verdict"] != NOT_HERE]
        measured = [row for row in rows if "value" in row["figures"]]
        missed = [row for row in rows if row["verdict"] == MISS and row not in measured]
        yield f"### {TITLES[run['block']]}"
        yield from ("", f"{run['device']}, torch {run['torch']}, {run['date']}: {len(rows)} cases,")
        yield f"{len(rows) - len(missed)} as expected ([all of them](../bench/results/{file.with_suffix('.md').name}))."
        if measured:
            yield from ("", "| case | expected | measured |", "|" + " --- |" * 3)
            yield from (f"| {row['case']} | {row['expected']} | {row['measured']} |" for row in measured)
        yield from ("", *(f"- {note}" for note in run.get("notes", ())), "")


def section(run: dict[str, Any]) -> str:
    checks = next(session["suite"] for session in run["sessions"] if "suite" in session)
    notes = [f"{number}, {session['note']}" for number, session in enumerate(run["sessions"], 1)]
    result = f"../bench/results/{run['date']}-{run['name']}.md"
    model = _MODEL.format(device=run["device"], result=result, notes="; ".join(notes))
    return "\n".join(
        [
            model, *training(run), "", _READING, *parity(run), "",
            _KERNELS.format(failed=len(checks["failed"])), *kernels(run), "",
            _PREDICTIONS, *predictions(run), "",
            *programme(),
        ]
    )  # fmt: skip


_MODEL = """\
## Measured on one GPU

{device}, 16 cores and 128 GiB of its host ([everything that was measured]({result})). A Llama of 1.54 billion
parameters (`bench/gpu_train.py`), bf16, AdamW, clipping, recomputation, 8 x 2,048 tokens; "compute alone" is forward
and backward of bf16 weights that nothing updates. One GPU splits nothing, so this is what each engine costs by itself,
not how it scales. "GPU busy" is the share of the time in which kernels run. Sessions: {notes}.
"""
_READING = """\
Peaks are those of tensors. In session 1 gradients kept their memory between steps (3 GB here); since then a device has
it back. FSDP2 holds fp32 weights alone between its blocks and casts what it gathers, which takes less on a single GPU
(of eight ranks, both hold 2 of 16 bytes per parameter) and more time. Streaming was measured before its masters were
updated chunk by chunk, when joining and splitting them took most of a step, and all offload before updates ran beside
the next forward (measured since: [what offload costs](#what-offload-costs)).
"""
_KERNELS = """\
### Kernels

All checks against fp64 passed ({failed} failed), under compute-sanitizer too, without an error. 2^30 elements:
"""
_PREDICTIONS = """\
### What `plan` says

transformers' own models in eager mode, SDPA attention, predicted before they were measured. The sizes were right. The
times were too short: `plan` counted matrix products alone, and a whole server's memory bandwidth for one GPU. The
last column has its prediction after that was corrected, knowing these runs. It does not count that a small mixture of
experts waits for the host to start its kernels. (The streamed run came before its masters were updated chunk by
chunk.) What the allocator takes from the driver beyond tensors is cached blocks, which it gives up before it runs out
of memory, and CUDA's own.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of docs/performance.md")
    options = parser.parse_args()
    run = kept()
    if options.write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), section(run), COMMAND), encoding="utf-8")
    else:
        sys.stdout.write(section(run))


if __name__ == "__main__":
    main()
