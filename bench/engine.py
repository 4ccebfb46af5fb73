"""Training engines compared: one model, alternating within one run, so that load on the machine affects all equally.

python -m bench.engine --size 25m --oracle-python .oracle/bin/python --name first-light
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.surroundings import ROOT, about, keep, rank_environments

ENGINES = ("hf_zero", "hf_zero-released", "deepspeed", "fsdp2", "ddp", "compute")
log = logging.getLogger("bench")


@dataclass(frozen=True)
class Variant:
    """One row of the result."""

    engine: str
    stage: int | None = None
    released: bool = False  # stage 3, with every unit released after its forward
    offload: str = ""  # offload device of the optimizer states: cpu, nvme; "": none
    earlier: bool = False  # from the checkout that --earlier names

    @property
    def name(self) -> str:
        """The name in the table."""
        stage = "" if self.stage is None else f" {self.stage}"
        kind = f"{' released' if self.released else ''}{' earlier' if self.earlier else ''}"
        return f"{self.engine}{stage}{kind}{self.offload and f' {self.offload}'}"


def main() -> None:
    """Measure all variants in turn for several rounds, then write JSON and Markdown."""
    arguments = _parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    variants = _variants(arguments)
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        rounds.append({})
        for variant in variants:
            rounds[-1][variant.name] = _measure(variant, arguments)
            log.info("round %d  %s", number + 1, report.one_line(variant.name, rounds[-1]))
    run = {
        **about("bench.engine"),
        "settings": {key: getattr(arguments, key) for key in ("size", "ranks", "rounds", "steps", "warmup", "adam")},
        "variants": [{**asdict(variant), "name": variant.name} for variant in variants],
        "rounds": rounds,
    }
    _write(run, arguments)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=list(ENGINES), help="engines to compare")
    parser.add_argument("--stage", nargs="+", type=int, default=[0, 1, 2], help="ZeRO stages of hf_zero and deepspeed")
    parser.add_argument(
        "--offload",
        nargs="+",
        default=[""],
        choices=("", "cpu", "nvme"),
        help="offload_optimizer of hf_zero and deepspeed",
    )
    parser.add_argument("--nvme", default=tempfile.gettempdir(), help="folder on the drive")
    parser.add_argument("--size", default="25m", help="model size from bench/models.py")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    parser.add_argument("--steps", type=int, default=5, help="measured steps per round")
    parser.add_argument("--warmup", type=int, default=2, help="warm-up steps per round")
    parser.add_argument("--adam", choices=("native", "torch"), default="native", help="DeepSpeed's Adam, or torch_adam")
    parser.add_argument("--oracle-python", help="interpreter with real DeepSpeed", default=sys.executable)
    parser.add_argument("--earlier", type=Path, help="checkout of an earlier hf_zero with a .venv, to compare with")
    parser.add_argument("--name", default="engine", help="part of the result files' names")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--timeout", type=float, default=1200, help="seconds per measurement (first use compiles)")
    return parser.parse_args()


def _variants(arguments: argparse.Namespace) -> list[Variant]:
    variants = []
    for engine in arguments.engine:
        if engine in ("hf_zero", "deepspeed"):
            places = [place for place in arguments.offload if engine == "hf_zero" or place != "nvme"]
            times = (False, True) if engine == "hf_zero" and arguments.earlier else (False,)
            variants += [
                Variant(engine, stage, offload=place, earlier=earlier)
                for stage in arguments.stage
                for place in places
                for earlier in times
            ]
        elif engine == "hf_zero-released":
            variants += [Variant("hf_zero", stage, released=True) for stage in arguments.stage if stage == 3]
        elif engine == "fsdp2":
            variants += [Variant("fsdp2-reshard"), Variant("fsdp2-keep")]
        else:
            variants.append(Variant(engine))
    return variants


def _measure(variant: Variant, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one variant in new processes; returns their results, averaged over ranks."""
    oracle = arguments.oracle_python if variant.engine == "deepspeed" else None
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = Path(folder) / "result"
        command = _command(variant, arguments, out)
        processes = []
        try:
            with open(Path(folder) / "log", "w+") as output:
                for environment in rank_environments(arguments.ranks, deepspeed_python=oracle):
                    process = subprocess.Popen(
                        command,
                        cwd=arguments.earlier if variant.earlier else ROOT,
                        env=environment,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                    processes.append(process)
                codes = _wait(processes, arguments.timeout)
        finally:
            _kill(processes)
        if any(codes):
            raise SystemExit(f"{variant.name} failed ({codes}):\n{(Path(folder) / 'log').read_text()[-8000:]}")
        return report.over_ranks([json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(arguments.ranks)])


def _command(variant: Variant, arguments: argparse.Namespace, out: Path) -> list[str]:
    python = arguments.oracle_python if variant.engine == "deepspeed" else sys.executable
    if variant.earlier:
        python = str(arguments.earlier.absolute() / ".venv" / "bin" / "python")
    adam = arguments.adam if variant.engine == "deepspeed" else "native"
    options = {"engine": variant.engine, "stage": variant.stage or 0, "size": arguments.size, "adam": adam, "out": out}
    options |= {"offload": variant.offload, "nvme": arguments.nvme}
    options |= {"warmup": arguments.warmup, "steps": arguments.steps, "released": int(variant.released)}
    return [python, "-m", "bench.worker", *(f"--{key}={value}" for key, value in options.items())]


def _wait(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> list[int | None]:
    """Exit codes. If one process fails, the others are not waited for."""
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout_s)
    while datetime.datetime.now() < deadline:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or any(codes):
            return codes
        try:
            processes[0].wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
    return ["timeout" for _ in processes]  # type: ignore[misc]


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _write(run: dict[str, Any], arguments: argparse.Namespace) -> None:
    text = report.markdown(run)
    keep(run, text, f"{arguments.name}-{arguments.size}", arguments.results)
    log.info("%s\nwritten to %s", text, arguments.results)


if __name__ == "__main__":
    main()
