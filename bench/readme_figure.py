"""The plot and the table of figures in README and docs/index.md, from stored results; run it to write them."""

from __future__ import annotations

import io
import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "bench" / "results" / "2026-11-28-beside-others-25m.json"
PLOT = ROOT / "docs" / "plots" / "step.svg"
SHOWN = {
    **{f"hf_zero {stage}": f"hf_zero, stage {stage}" for stage in range(4)},
    **{f"deepspeed {stage}": f"DeepSpeed, stage {stage}" for stage in range(4)},
    "fsdp2-reshard": "FSDP2",
    "ddp": "DDP",
}
PAGES = (ROOT / "README.md", ROOT / "docs" / "index.md")
BEGIN, END = "<!-- begin: python -m bench.readme_figure -->\n", "<!-- end -->\n"
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


def table() -> str:
    """README's rows of figures: how many times as fast, and the share of the peak memory, in the same run."""
    from bench.gpu_report import kept

    run, gpu = json.loads(RESULT.read_text(encoding="utf-8")), kept()
    size, ranks = run["settings"]["size"].upper(), run["settings"]["ranks"]
    time, memory = (ratios(key, run["rounds"]) for key in LABELS)
    train = {row["case"]: row for row in gpu["sessions"][0]["train"]}
    card = gpu["device"].split()[1]

    def beside(ours: str, theirs: str) -> str:
        faster = train[theirs]["s_per_step"] / train[ours]["s_per_step"]
        return f"{faster:.2f} | {train[ours]['peak_gb'] / train[theirs]['peak_gb']:.2f}"

    host = beside("hf_zero 3 offload", "deepspeed 3 offload")
    fast = f"{1 / time[1]:.1f} to {1 / time[0]:.1f}"
    rows = [
        f"| one {card}, 1.5B Llama | FSDP2 | {beside('hf_zero 3', 'fsdp2')} |",
        f"| the same | DeepSpeed 0.19.8, stage 3 | {beside('hf_zero 3', 'deepspeed 3')} |",
        f"| the same, states and weights in host memory | DeepSpeed | {host} |",
        f"| {ranks} processes on CPUs, {size} Llama | DeepSpeed, stages 0 to 3 | {fast} | "
        f"{memory[0]:.2f} to {memory[1]:.2f} |",
    ]
    header = "| a training step on | hf_zero compared with | times as fast | times the peak memory |"
    return "\n".join([header, "|---|---|---|---|", *rows])


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


def with_table(page: str) -> str:
    """The text of a page with today's table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n\n{END}{rest.partition(END)[2]}"


def main() -> None:
    PLOT.parent.mkdir(exist_ok=True)
    PLOT.write_text(plot(rounds()), encoding="utf-8")
    for page in PAGES:
        page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
