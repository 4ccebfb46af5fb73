"""The plot and the lines of figures in README, from stored results: run `python -m bench.readme_figure`."""

from __future__ import annotations

import io
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "bench" / "results" / "2026-11-23-beside-others-25m.json"
PLOT = ROOT / "docs" / "plots" / "step.svg"
SHOWN = {
    **{f"hf_zero {stage}": f"hf_zero, stage {stage}" for stage in range(4)},
    **{f"deepspeed {stage}": f"DeepSpeed, stage {stage}" for stage in range(4)},
    "fsdp2-reshard": "FSDP2",
    "ddp": "DDP",
}
LABELS = {"wall_s": "seconds per step", "peak_mb": "peak memory of a rank, MB"}

Rounds = list[dict[str, dict[str, Any]]]


def rounds() -> Rounds:
    """The results of each engine, by name, in each round."""
    read: Rounds = json.loads(RESULT.read_text(encoding="utf-8"))["rounds"]
    return read


def ratios(key: str, measured: Rounds) -> tuple[float, float]:
    """Smallest and largest hf_zero / DeepSpeed over the stages; each is the median of the ratios within a round."""
    stages = [
        statistics.median(one[f"hf_zero {stage}"][key] / one[f"deepspeed {stage}"][key] for one in measured)
        for stage in range(4)
    ]
    return min(stages), max(stages)


def line() -> str:
    """The plot's figures in a sentence."""
    run = json.loads(RESULT.read_text(encoding="utf-8"))
    settings = run["settings"]
    time, memory = ("{:.2f}-{:.2f}".format(*ratios(key, run["rounds"])) for key in LABELS)
    return (
        f"a step of a {settings['size'].upper()}-parameter Llama on {settings['ranks']} CPU ranks takes {time} of "
        f"DeepSpeed 0.19.8's time and {memory} of its peak memory, stage by stage"
    )


def gpu_line() -> str:
    """The same for one GPU: hf_zero's step time relative to others', in one session."""
    from bench.gpu_report import kept

    run = kept()
    seconds = {row["case"]: row.get("s_per_step") for row in run["sessions"][0]["train"]}
    plain = {name: f"{seconds['hf_zero 3'] / seconds[name]:.2f}" for name in ("fsdp2", "deepspeed 3")}
    away = f"{seconds['hf_zero 3 offload'] / seconds['deepspeed 3 offload']:.2f}"
    card = run["device"].split()[1]
    return (
        f"a step of a 1.5B Llama on one {card} takes {plain['fsdp2']} of FSDP2's time and {plain['deepspeed 3']} of "
        f"DeepSpeed's, {away} of DeepSpeed's with states and weights in host memory"
    )


def plot(measured: Rounds) -> str:
    """SVG with one bar per engine, the median over rounds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(SHOWN)[::-1]
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axes, (key, label) in zip(panels, LABELS.items(), strict=True):
        values = [statistics.median(one[name][key] for one in measured) for name in names]
        colours = ["#4051b5" if name.startswith("hf_zero") else "#9e9e9e" for name in names]
        axes.barh([SHOWN[name] for name in names], values, color=colours)
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("A training step on CPUs: 25M-parameter Llama, 2 ranks, bf16, AdamW", fontsize=10)
    text = io.StringIO()
    pyplot.rcParams["svg.hashsalt"] = "step"
    figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)
    return text.getvalue()


def main() -> None:
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(plot(rounds()), encoding="utf-8")
    sys.stdout.write(f"{line()}\n{gpu_line()}\n")


if __name__ == "__main__":
    main()
