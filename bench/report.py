"""Turns raw rounds into a table: medians, ratios within a round, and their spread."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

NUMBERS = ("cpu_s", "wall_s", "peak_mb", "peak_steps_mb", "after_imports_mb")
QUIET = 0.1  # largest share of the machine that others may use in a measurement of wall time
WHOLE, SHARDED = (0, 1, 2), (3,)  # stages without and with partitioned parameters
ANY = (*WHOLE, *SHARDED)
# The project's performance targets, checked in every report: (title, figure, against, maximum, stages).
TARGETS = (
    ("CPU seconds, against DeepSpeed at the same stage", "cpu_s", "deepspeed", 0.75, WHOLE),
    ("CPU seconds, against DDP", "cpu_s", "ddp", 1.0, WHOLE),
    ("wall time, against DeepSpeed at the same stage", "wall_s", "deepspeed", 1.0, WHOLE),
    ("wall time, against DDP", "wall_s", "ddp", 1.0, WHOLE),
    ("peak memory, against DeepSpeed at the same stage", "peak_mb", "deepspeed", 1.0, WHOLE),
    ("CPU seconds beyond compute, against DDP", "cpu_s beyond compute", "ddp", 0.7, (2,)),
    ("CPU seconds beyond compute, against FSDP2 not resharding", "cpu_s beyond compute", "fsdp2-keep", 0.7, (2,)),
    ("CPU seconds beyond compute, against FSDP2 not resharding", "cpu_s beyond compute", "fsdp2-keep", 0.5, SHARDED),
    ("CPU seconds beyond compute, against FSDP2 resharding", "cpu_s beyond compute", "fsdp2-reshard", 0.5, SHARDED),
    ("CPU seconds, against DeepSpeed", "cpu_s", "deepspeed", 0.6, SHARDED),
    ("CPU seconds, against FSDP2 resharding", "cpu_s", "fsdp2-reshard", 0.9, SHARDED),
    ("wall time, against DeepSpeed", "wall_s", "deepspeed", 0.6, SHARDED),
    ("wall time, against FSDP2 resharding", "wall_s", "fsdp2-reshard", 0.9, SHARDED),
    ("peak memory, against DeepSpeed", "peak_mb", "deepspeed", 1.0, SHARDED),
    ("peak memory, against FSDP2 resharding", "peak_mb", "fsdp2-reshard", 1.0, SHARDED),
)


# The same for runs with offload to host memory.
OFFLOAD_TARGETS = (
    ("CPU seconds with offload, against DeepSpeed's", "cpu_s", "deepspeed", 0.8, ANY),
    ("wall time with offload, against DeepSpeed's", "wall_s", "deepspeed", 0.8, ANY),
    ("peak memory with offload, against DeepSpeed's", "peak_mb", "deepspeed", 1.0, ANY),
)


def over_ranks(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One measurement: averages over ranks, memory of the worst rank, traffic issued by rank 0."""
    result = {key: sum(rank[key] for rank in ranks) / len(ranks) for key in ("cpu_s", "wall_s")}
    result |= {key: max(rank[key] for rank in ranks) for key in NUMBERS if key.endswith("_mb")}
    result["others_s"] = max(0.0, ranks[0]["busy_s"] - sum(rank["cpu_s"] for rank in ranks))
    losses = [sum(step) / len(ranks) for step in zip(*(rank["losses"] for rank in ranks))]
    return {**result, "losses": losses, **{key: ranks[0][key] for key in ("collectives", "python", "versions")}}


def one_line(name: str, measured: dict[str, Any]) -> str:
    """Progress while the benchmark runs."""
    result = measured[name]
    ratio = f"{result['cpu_s'] / measured['ddp']['cpu_s']:.2f} x ddp" if "ddp" in measured else ""
    return (
        f"{name:15s} cpu {result['cpu_s']:.3f} s  wall {result['wall_s']:.3f} s  peak {result['peak_mb']:.0f} MB  "
        f"loss {result['losses'][-1]:.4f}  {ratio}"
    )


def markdown(run: dict[str, Any]) -> str:
    """The whole report."""
    machine, settings = run["machine"], run["settings"]
    versions = {name: version for m in run["rounds"][0].values() for name, version in m["versions"].items()}
    lines = [
        f"# Engines beside each other: {settings['size']} model, {settings['ranks']} ranks",
        "",
        f"{run['date']} · {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, load "
        f"{machine['load_1min']} at the end · Python {machine['python']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        f"`{run['command']}`: {settings['rounds']} interleaved rounds of {settings['steps']} steps after "
        f"{settings['warmup']} warm-up steps; gloo, one thread per rank, bf16, AdamW, clip 1.0. Ratios are taken "
        "within a round and given as median (min-max). Columns are explained in [bench/README.md](../README.md).",
        "",
        *_step_table(run),
        "",
        *_memory_table(run),
        "",
        *_python_table(run),
        "",
        *_target_table(run),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _step_table(run: dict[str, Any]) -> list[str]:
    peers = {"DDP": "ddp", "DeepSpeed": "deepspeed"}
    if _stands_beside_earlier(run):
        peers["earlier"] = "earlier"
    times = [f"{time}{over}" for time in ("CPU", "wall") for over in (" s/step", *(f" / {title}" for title in peers))]
    rows = []
    for variant in run["variants"]:
        row = [variant["name"]]
        for figure in ("cpu_s", "wall_s"):
            row.append(f"{_median(run, variant['name'], figure):.3f}")
            row += [_spread(_ratios(run, variant, figure, peer)) for peer in peers.values()]
        disturbed = [f"{_others_share(run, measured[variant['name']]):.0%}" for measured in run["rounds"]]
        rows.append([*row, f"{run['rounds'][-1][variant['name']]['losses'][-1]:.4f}", " ".join(disturbed)])
    return _table(["engine", *times, "last loss", "others, by round"], rows)


def _memory_table(run: dict[str, Any]) -> list[str]:
    peers = {"DeepSpeed": "deepspeed"} | ({"earlier": "earlier"} if _stands_beside_earlier(run) else {})
    rows = []
    for variant in run["variants"]:
        name = variant["name"]
        peak, steps, imports = (_median(run, name, key) for key in NUMBERS[2:])
        memory = [f"{peak:.0f}", f"{steps:.0f}", f"{peak + imports:.0f}"]
        ratios = [_spread(_ratios(run, variant, "peak_mb", peer)) for peer in peers.values()]
        rows.append([name, *memory, *ratios, _traffic(run["rounds"][-1][name]["collectives"])])
    over = [f"peak / {title}" for title in peers]
    return _table(["engine", "peak MB", "in steps", "absolute", *over, "collectives of a step"], rows)


def _stands_beside_earlier(run: dict[str, Any]) -> bool:
    return any(variant.get("earlier") for variant in run["variants"])


def _traffic(collectives: dict[str, dict[str, int]]) -> str:
    parts = [f"{kind} {entry['calls']}x {entry['bytes'] / 1e6:.1f} MB" for kind, entry in collectives.items()]
    return ", ".join(parts) or "none"


def _python_table(run: dict[str, Any]) -> list[str]:
    rows = []
    for variant in run["variants"]:
        seen = run["rounds"][-1][variant["name"]]["python"]
        most = ", ".join(
            f"{entry['function']} {entry['calls']}x {1e3 * entry['own_s']:.1f} ms" for entry in seen["most"]
        )
        rows.append([variant["name"], str(seen["calls"]), most.replace("|", "/").replace("<", "").replace(">", "")])
    return _table(["engine", "Python calls per step", "functions with the most time (under the profiler)"], rows)


def _target_table(run: dict[str, Any]) -> list[str]:
    rows = []
    promises = [(*target, "") for target in TARGETS] + [(*target, "cpu") for target in OFFLOAD_TARGETS]
    for title, figure, peer, limit, stages, offload in promises:
        for variant in run["variants"]:
            is_meant = variant.get("offload", "") == offload
            is_ours = variant["engine"] == "hf_zero" and not variant.get("earlier")
            promised = is_ours and variant["stage"] in stages and is_meant
            ratios = _ratios(run, variant, figure, peer) if promised else []
            if ratios:
                met = "met" if median(ratios) <= limit else f"missed by {median(ratios) - limit:.2f}"
                rows.append([title, variant["name"].removeprefix("hf_zero "), f"{limit:.2f}", _spread(ratios), met])
    return _table(["promise", "stage", "at most", "measured", ""], rows) if rows else []


def _ratios(run: dict[str, Any], variant: dict[str, Any], figure: str, peer: str) -> list[float]:
    """Ratios within each round of this variant to its peer; empty without a peer, or for the peer itself.

    "A beyond B" is figure A without that of variant B. For wall times only rounds without load from other processes
    count, if there are any.
    """
    if peer == "deepspeed":
        peer = f"deepspeed {variant['stage']}" + (" cpu" if variant.get("offload") else "")
    elif peer == "earlier" and not variant["released"]:
        place = variant.get("offload", "")
        peer = f"{variant['engine']} {variant['stage']} earlier{place and f' {place}'}"
    name = variant["name"]
    own_figure, _, baseline = figure.partition(" beyond ")
    if name == peer or peer not in run["rounds"][0] or baseline and baseline not in run["rounds"][0]:
        return []
    if peer == "fsdp2-keep" and variant["released"]:
        return []  # one keeps the weights, the other does not
    rounds = run["rounds"]
    if baseline:
        return [
            (measured[name][own_figure] - measured[baseline][own_figure])
            / (measured[peer][own_figure] - measured[baseline][own_figure])
            for measured in rounds
        ]
    if figure == "wall_s":
        rounds = [r for r in rounds if max(_others_share(run, r[name]), _others_share(run, r[peer])) <= QUIET] or rounds
    return [measured[name][figure] / measured[peer][figure] for measured in rounds]


def _others_share(run: dict[str, Any], measured: dict[str, Any]) -> float:
    """The share of the machine's CPU time that other processes used during a measurement."""
    return float(measured.get("others_s", 0.0) / (measured["wall_s"] * run["machine"]["cores"]))


def _median(run: dict[str, Any], name: str, figure: str) -> float:
    return float(median(measured[name][figure] for measured in run["rounds"]))


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]
