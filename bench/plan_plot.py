"""Draw README's picture of a plan: the memory of every candidate of its example, with the limit of a device.

    python -m bench.plan_plot             # writes docs/plots/plan.png

It has the bars of `plan --html`, with the same colours.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from hf_zero.planning.candidates import Training
from hf_zero.planning.choose import RankedPlans, plan
from hf_zero.planning.estimate import gigabytes
from hf_zero.planning.machine import hardware
from hf_zero.planning.memory import KINDS
from hf_zero.planning.model import load_model
from hf_zero.planning.page import COLOURS
from hf_zero.planning.show import batch_of

FILE = Path(__file__).resolve().parent.parent / "docs" / "plots" / "plan.png"
_LONGEST = 2.4  # bars, in limits; longer ones are cut

_WIDTH = 40  # characters of a name in one line


def example() -> RankedPlans:
    """`hf-zero plan 70b --gpu h100 --gpus-per-node 8`."""
    machine = hardware({"gpu": "h100", "gpus_per_node": 8})
    return plan(load_model("70b"), machine, Training(searches=True))


def described(found: RankedPlans) -> str:
    """The names and sizes in the picture, stored in the file, so that a test notices a picture of an older plan."""
    rows = [f"{each.candidate.name}, {batch_of(each)}: {gigabytes(each.memory.device_total)}" for each in found.rows]
    return "; ".join(rows)


def _wrapped(name: str) -> str:
    """Lines of a name, broken at commas only: not within "1 x 1"."""
    parts = [part.replace(" ", "\N{NO-BREAK SPACE}") for part in name.split(", ")]
    return textwrap.fill(", ".join(parts), _WIDTH, break_long_words=False)


def draw(found: RankedPlans, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, limit = found.rows[::-1], found.hardware.limit / 1e9
    figure, axes = pyplot.subplots(figsize=(10.2, 0.4 * len(rows) + 0.7))
    for place, each in enumerate(rows):
        start, is_chosen = 0.0, each is found.chosen
        for kind in KINDS:
            size = each.memory.device.get(kind, 0) / 1e9
            axes.barh(place, max(0.0, min(size, _LONGEST * limit - start)), 0.7, start, color=COLOURS[kind])
            start = min(start + size, _LONGEST * limit)
        total = f"{gigabytes(each.memory.device_total)} {'' if each.fits else '✗'}"
        weight = "bold" if is_chosen else "normal"
        axes.text(1.02 * _LONGEST * limit, place, total, va="center", weight=weight)
        if each.memory.device_total / 1e9 > _LONGEST * limit:
            axes.text(_LONGEST * limit, place, "≫", va="center", ha="right", color="white")
        if is_chosen:
            axes.axhspan(place - 0.5, place + 0.5, color="#e7f5ee", zorder=0)
    axes.axvline(limit, color="#b00020")
    names = [_wrapped(f"{each.candidate.name}, {batch_of(each)}") for each in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=9)
    for label, each in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color("black" if each.fits else "#6b6b6b")
        label.set_weight("bold" if each is found.chosen else "normal")
    axes.set_xlim(0, _LONGEST * limit)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in KINDS]
    handles.append(pyplot.Rectangle((0, 0), 1, 1, color="#b00020"))
    titles = [*KINDS, f"limit: {gigabytes(found.hardware.limit)}"]
    figure.legend(handles, titles, ncols=len(titles), loc="upper center", frameon=False, columnspacing=1.2)
    figure.tight_layout(rect=(0, 0, 0.93, 0.96))
    figure.savefig(target, dpi=100, metadata={"Software": None, "Description": described(found)})


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw(example(), FILE)
