"""Turns the rounds of bench/checkpoint.py into a table: medians, ratios within a round, and targets."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

OURS, THEIRS = "hf_zero", "deepspeed"
KINDS = ("one file", "shards")
MEMORY_MARGIN_MB = 300
Round = dict[str, Any]
Figure = Callable[[Round], float]


def markdown(run: dict[str, Any]) -> str:
    """The whole report."""
    settings, computer = run["settings"], run["machine"]
    size = run["saved"][0][OURS]["checkpoint_mb"] / 1e3
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    lines = [
        f"# Checkpoints: stage {settings['stage']}, {settings['size']} model in bf16, {settings['ranks']} ranks",
        "",
        f"{run['date']} · {computer['cpu']}, {computer['cores']} cores, {computer['memory_gib']} GiB, load "
        f"{computer['load_1min']} at the end · Python {computer['python']}, {versions}",
        "",
        f"`{run['command']}`: a checkpoint of {size:.1f} GB, rounds: {settings['rounds']}, the two in turns; "
        "medians (min-max), ratios are taken within a round. The copy is a plain one of the same bytes with fsync, by "
        "one process. Anonymous memory is RssAnon: of saving and loading how far it rose, of consolidating all of it.",
        "",
        *_saved(run["saved"]),
        "",
        *_consolidated(run["consolidated"]),
        "",
        *_promises(run),
    ]
    return "\n".join(lines) + "\n"


def _saved(rounds: list[Round]) -> list[str]:
    header = ["", "seconds", "until it is on the disk", "CPU s per rank", "anonymous MB", "seconds / copy"]
    rows = []
    for what in ("save", "load"):
        for engine in (OURS, THEIRS):
            rows.append(
                [
                    f"{what}, {engine}",
                    _spread(rounds, lambda r: r[engine][what]["wall_s"]),  # noqa: B023
                    _spread(rounds, lambda r: _durable(r, engine)) if what == "save" else "",  # noqa: B023
                    _spread(rounds, lambda r: r[engine][what]["cpu_s"]),  # noqa: B023
                    _spread(rounds, lambda r: r[engine][what]["anonymous_mb"], 0),  # noqa: B023
                    _spread(rounds, lambda r: r[engine][what]["wall_s"] / r[engine]["copy_s"]),  # noqa: B023
                ]
            )
    rows.append(["copy", _spread(rounds, lambda r: r[OURS]["copy_s"]), "the same", "", "", "1.00"])
    return _table(header, rows)


def _consolidated(rounds: list[Round]) -> list[str]:
    header = ["consolidating", "seconds", "without start and import", "/ copy", "anonymous MB", "largest shard MB"]
    rows = []
    for kind in KINDS:
        for engine in (OURS, THEIRS):
            rows.append(
                [
                    f"{kind}, {engine}",
                    _spread(rounds, lambda r: r[engine][kind]["wall_s"]),  # noqa: B023
                    _spread(rounds, lambda r: _net(r, engine, kind)),  # noqa: B023
                    _spread(rounds, lambda r: _net(r, engine, kind) / r[engine][kind]["copy_s"]),  # noqa: B023
                    _spread(rounds, lambda r: r[engine][kind]["anonymous_mb"], 0),  # noqa: B023
                    _spread(rounds, lambda r: r[engine][kind]["largest_mb"], 0),  # noqa: B023
                ]
            )
    rows.append(["copy of one file", _spread(rounds, lambda r: r[OURS]["one file"]["copy_s"]), "", "1.00", "", ""])
    return _table(header, rows)


def _promises(run: dict[str, Any]) -> list[str]:
    saved, consolidated = run["saved"], run["consolidated"]
    rows = []

    def promise(title: str, limit: float, rounds: list[Round], figure: Figure) -> None:
        found = median(map(figure, rounds))
        met = "met" if found <= limit else f"missed by {found - limit:.2f}"
        rows.append([title, f"{limit:.2f}", _spread(rounds, figure), met])

    for what in ("save", "load"):
        title = f"{what}: seconds / DeepSpeed's"
        promise(title, 1.0, saved, lambda r: r[OURS][what]["wall_s"] / r[THEIRS][what]["wall_s"])  # noqa: B023
    promise("save: until on the disk / DeepSpeed's", 1.0, saved, lambda r: _durable(r, OURS) / _durable(r, THEIRS))
    for kind in KINDS:
        title = f"consolidating, {kind}: net seconds / copy"
        promise(title, 2.0, consolidated, lambda r: _net(r, OURS, kind) / r[OURS][kind]["copy_s"])  # noqa: B023
        title = f"consolidating, {kind}: anonymous MB less the largest shard"
        promise(title, MEMORY_MARGIN_MB, consolidated, lambda r: _above_shard(r, kind))  # noqa: B023
    return _table(["promise", "at most", "measured", ""], rows)


def _durable(found: Round, engine: str) -> float:
    return float(found[engine]["save"]["wall_s"] + found[engine]["save"]["then_durable_s"])


def _net(found: Round, engine: str, kind: str) -> float:
    """Seconds without interpreter startup and `import torch`."""
    return float(found[engine][kind]["wall_s"] - found[engine]["start"]["wall_s"])


def _above_shard(found: Round, kind: str) -> float:
    return float(found[OURS][kind]["anonymous_mb"] - found[OURS][kind]["largest_mb"])


def _spread(rounds: list[Round], figure: Figure, digits: int = 2) -> str:
    values = [figure(found) for found in rounds]
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows]]
