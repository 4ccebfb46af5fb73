"""Costs of Triton's kernels, read from their machine code; no GPU is needed.

    python -m bench.kernel_report --name kernels          # sm_80, sm_90, sm_100, gfx942; takes minutes of CPU time
    python -m bench.kernel_report --target cuda:90        # one of them
    python -m bench.kernel_report --earlier FILE.json     # also what has changed since an earlier result

Nothing here is a time. "over" lists the figures above the budget of an element-wise kernel; tests/support/budgets.py
has the budgets and the reasons.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.surroundings import about, keep
from tests.support.budgets import ELEMENTWISE, EXCESS, over, short
from tests.support.compilation import Compiled, compile_apart
from tests.support.passes import adamw_traffic
from tests.support.step_passes import measure as step_passes

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
_DTYPES = {"*fp32": "fp32", "*bf16": "bf16", "*fp16": "fp16", "*fp64": "fp64", "*u8": "u8"}


def measure(target: str, launches: str) -> list[dict[str, Any]]:
    """One row per specialisation of the launches."""
    backend, _, arch = target.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        place = int(arch) if arch.isdigit() else arch
        compiled = compile_apart("tests.kernels.launches", backend, place, Path(folder), 7200, launches)
    rows = [row(entry, backend) for entry in sorted(compiled, key=lambda entry: entry.kernel)]
    return [one for place, one in enumerate(rows) if one not in rows[:place]]


def row(entry: Compiled, backend: str) -> dict[str, Any]:
    kept = asdict(entry)
    for name in ("kernel", "signature", "stages", "seconds", "constants", "is_aligned", "fused", "may_fuse"):
        del kept[name]
    words = list(over(entry, ELEMENTWISE[backend]))
    return {"kernel": short(entry.kernel), "variant": variant(entry), **kept, "over": words}


def variant(entry: Compiled) -> str:
    """Its vectors with their dtypes, and the options that change the compiled code."""
    vectors = [f"{name} {_DTYPES[kind]}" for name, kind in entry.signature.items() if kind in _DTYPES]
    options = [name for name in ("skip", "seed") if entry.signature.get(name, "constexpr") != "constexpr"]
    options += [f"{value} bits" for name, value in entry.constants.items() if name == "BITS"]
    return ", ".join([*vectors, *options])


_COLUMNS = ("kernel", "variant", "registers", "occupancy", "shared", "barriers", "atomics", "loads and stores")
_COLUMNS += ("B/element", "instructions/element")


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|" + " --- |" * len(_COLUMNS)
    for one in rows:
        counted = "" if one["num_bytes"] is None else f"{one['num_bytes']:g}"
        yield (
            f"| {one['kernel']} | {one['variant']} | {one['registers']} | {one['occupancy']:.0%} | "
            f"{one['shared_bytes']} | {one['barriers']} | {one['atomics']} | {_pieces(one)} | {counted} | "
            f"{one['instructions_per_element']:.0f} |"
        )


def comparison(found: dict[str, Any], earlier: dict[str, Any]) -> Iterator[str]:
    """Registers, occupancy, shared memory, barriers and accesses, earlier -> now, where any of them has changed."""
    yield "| target | kernel | variant | registers | occupancy | shared | barriers | loads and stores |"
    yield "|" + " --- |" * 8
    for target, rows in found.items():
        before: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for one in earlier.get(target, []):
            before.setdefault((one["kernel"], one["variant"]), []).append(one)
        for now in rows:
            same = before.get((now["kernel"], now["variant"]))
            then = same.pop(0) if same else None  # several with the same name are matched in order
            if then is not None and _kept(then) != _kept(now):
                cells = (f"{a} -> {b}" if a != b else a for a, b in zip(_kept(then), _kept(now), strict=True))
                yield f"| {target} | {now['kernel']} | {now['variant']} | {' | '.join(cells)} |"


def _kept(one: dict[str, Any]) -> list[str]:
    numbers = [str(one["registers"]), f"{one['occupancy']:.0%}", str(one["shared_bytes"]), str(one["barriers"])]
    return [*numbers, _pieces(one)]


def _pieces(one: dict[str, Any]) -> str:
    return ", ".join(f"{count} x {piece} B" for piece, count in one["pieces"].items())


def markdown(run: dict[str, Any]) -> str:
    lines = [
        "# Triton's kernels in machine code",
        "",
        f"{run['date']} · triton {run['versions']['triton']}, torch {run['versions']['torch']}",
        "",
        f"`{run['command']}`",
        "",
        "Read from what the compiler made, not measured. Occupancy is the share of a processor's warps that registers",
        "and shared memory leave room for; a load or store is of one thread; instructions include those of slow paths.",
    ]
    for target, rows in run["found"].items():
        elementwise = [one for one in rows if one["kernel"] not in EXCESS]
        above = sum(bool(one["over"]) for one in elementwise)
        lines += [
            "",
            f"## {target}",
            "",
            f"{above} of {len(elementwise)} element-wise specialisations are over their budget.",
        ]
        lines += ["", *table(rows)]
    if run["earlier"]:
        date, found = run["earlier"]["date"], run["earlier"]["found"]
        lines += ["", f"## What has changed since {run['earlier']['name']}, of {date}", ""]
        lines += comparison(run["found"], found)
    lines += ["", "## Over the budget, and why", "", "| kernel | why |", "| --- | --- |"]
    lines += [f"| {name} | {excess.why} |" for name, excess in EXCESS.items()]
    return "\n".join(lines) + "\n"


def earlier(path: Path) -> dict[str, Any]:
    """The compared part of an earlier result."""
    run = json.loads(path.read_text(encoding="utf-8"))
    columns = ("kernel", "variant", "registers", "occupancy", "shared_bytes", "barriers", "pieces")
    found = {target: [{name: one[name] for name in columns} for one in rows] for target, rows in run["found"].items()}
    return {"name": path.stem, "date": run["date"], "found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", default=TARGETS, choices=TARGETS)
    parser.add_argument("--all", action="store_true", help="every combination of dtypes and options")
    parser.add_argument("--earlier", type=Path, help="earlier result (.json) to compare with")
    parser.add_argument("--name", help="store the result in bench/results under this name")
    options = parser.parse_args()
    run = {
        **about("bench.kernel_report", "triton"),
        "traffic": adamw_traffic(),
        "passes": step_passes(),
        "earlier": earlier(options.earlier) if options.earlier else None,
        "found": {target: measure(target, "ALL" if options.all else "QUICK") for target in options.target},
    }
    sys.stdout.write(markdown(run))
    if options.name:
        keep(run, markdown(run), options.name)


if __name__ == "__main__":
    main()
