"""How long Triton's kernels take to compile with an empty cache, and the number of specialisations.

    python -m bench.compile_time --name cold            # sm_90, CPU seconds; no GPU is needed
    python -m bench.compile_time --all --arch 80        # every combination of dtypes and options, some ten minutes

CPU time of the process, including the assembler: the first step of a run waits for it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench.surroundings import about, keep
from tests.support.compilation import Compiled, compile_apart

WHAT = {
    "FIRST_STEP": "the first step of a bf16 run with AdamW and clipping",
    "QUICK": "every kernel, plain fp32 and bf16 with all options",
    "ALL": "every kernel, all dtypes and options of an engine",
}


def measure(launches: str, backend: str, arch: int | str) -> list[Compiled]:
    """Compiles every specialisation into an empty cache."""
    with tempfile.TemporaryDirectory() as folder:
        return compile_apart("tests.kernels.launches", backend, arch, Path(folder), 7200, launches)


def summary(compiled: list[Compiled]) -> dict[str, Any]:
    kernels = Counter(entry.kernel.rpartition("gpu.")[2] for entry in compiled)
    seconds: Counter[str] = Counter()
    for entry in compiled:
        seconds[entry.kernel.rpartition("gpu.")[2]] += entry.seconds  # type: ignore[assignment]
    rows = [{"kernel": name, "specialisations": kernels[name], "cpu_s": seconds[name]} for name in sorted(kernels)]
    return {"specialisations": len(compiled), "cpu_s": sum(entry.seconds for entry in compiled), "kernels": rows}


def markdown(run: dict[str, Any]) -> str:
    lines = [
        f"# Compiling Triton's kernels for {run['target']}, from an empty cache",
        "",
        f"{run['date']} · {run['machine']['cpu']}, {run['machine']['cores']} cores, load "
        f"{run['machine']['load_1min']} · triton {run['versions']['triton']}, torch {run['versions']['torch']}",
        "",
        f"`{run['command']}`: CPU seconds, assembler included.",
        "",
        "| what | specialisations | CPU s |",
        "| --- | --- | --- |",
    ]
    for name, found in run["found"].items():
        lines.append(f"| {WHAT[name]} | {found['specialisations']} | {found['cpu_s']:.1f} |")
    most = list(run["found"].values())[-1]
    lines += ["", "| kernel | specialisations | CPU s of one |", "| --- | --- | --- |"]
    for row in most["kernels"]:
        lines.append(f"| {row['kernel']} | {row['specialisations']} | {row['cpu_s'] / row['specialisations']:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="cuda", choices=("cuda", "hip"))
    parser.add_argument("--arch", default="90", help="90, 80, 100; gfx942 for hip")
    parser.add_argument("--all", action="store_true", help="also every combination of dtypes and options")
    parser.add_argument("--name", help="store the result in bench/results under this name")
    options = parser.parse_args()
    arch: int | str = int(options.arch) if options.arch.isdigit() else options.arch
    names = ["FIRST_STEP", "QUICK", *(["ALL"] if options.all else [])]
    run = {
        **about("bench.compile_time", "triton"),
        "target": f"{options.backend} {arch}",
        "found": {name: summary(measure(name, options.backend, arch)) for name in names},
    }
    sys.stdout.write(markdown(run))
    if options.name:
        keep(run, markdown(run), f"compile-{options.name}")


if __name__ == "__main__":
    main()
