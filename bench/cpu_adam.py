"""The CPU Adam step against other implementations: bf16 gradients in, bf16 weights out, fp32 masters and moments.

    OMP_NUM_THREADS=1 python -m bench.cpu_adam --oracle-python .oracle/bin/python --name loaded

In every round each implementation takes its turn, all in one process (DeepSpeed's in a separate one), so that other
load on the machine affects all equally. The lower bound is the same memory traffic without arithmetic: 28 bytes per
parameter.
"""

from __future__ import annotations

import argparse
import datetime
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from bench import surroundings
from bench.surroundings import keep
from tests.support.oracle import oracle_environment

OURS, FLOOR, DEEPSPEED = "hf_zero, one pass", "same traffic without arithmetic", "DeepSpeedCPUAdam and its casts"
OURS_8, FLOOR_8 = "hf_zero, one pass, 8-bit states", "traffic of 8-bit states without arithmetic"
OURS_SPLIT = "hf_zero, one pass, masters in the weights' bits and 16 more"
FUSED, FOREACH = "torch fused AdamW and its casts", "torch foreach AdamW and its casts"
SCALE = 0.5  # the factor of averaging over ranks and clipping; ours applies it in the same pass, others need another
COPY = "copy of fp32 (8 bytes)"
# Bytes moved per parameter: read and write of every array, casts included.
BYTES = {FLOOR: 28, OURS: 28, FLOOR_8: 16, OURS_8: 16, OURS_SPLIT: 26, COPY: 8, FUSED: 48, DEEPSPEED: 48, FOREACH: 120}
Step = Callable[[], object]


def cpu_seconds() -> float:
    """User and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(step: Step) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    step()
    return time.perf_counter() - wall, cpu_seconds() - cpu


def contenders(numel: int) -> dict[str, Step]:
    """All implementations on one set of arrays; the time does not depend on their values."""
    from hf_zero.kernels.adam import AdamRule, adam
    from hf_zero.kernels.adam8 import BlockVectors, adam8
    from hf_zero.kernels.dynamic8 import packed_bytes
    from hf_zero.kernels.vectors import Applied, Vectors
    from hf_zero.offload.split_masters import HalfRest

    master, m, v, wide = (torch.zeros(numel) for _ in range(4))
    gradient = torch.randn(numel).mul_(0.01).bfloat16()  # the 8-bit codes must differ: they index lookup tables
    lp_param = torch.zeros(numel, dtype=torch.bfloat16)
    packed = tuple(torch.zeros(packed_bytes(numel), dtype=torch.uint8) for _ in range(2))
    rule = AdamRule(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)
    vectors = Vectors(weight=master, gradient=gradient, states=(m, v), lp_param=lp_param)
    rest = HalfRest(torch.randint(-(1 << 15), 1 << 15, (numel,), dtype=torch.int16))
    split = Vectors(torch.randn(numel).bfloat16(), gradient, (m, v), rest=rest)
    blocks = BlockVectors(weight=master, gradient=gradient, states=packed, lp_param=lp_param)

    def floor(*states: torch.Tensor) -> None:
        """Reads the gradient, reads and writes states and masters, writes the weight: in chunks, as the kernel does."""
        chunk = 1 << 18
        for start in range(0, numel, chunk):
            length = min(chunk, numel - start)
            part = wide[:length].copy_(gradient.narrow(0, start, length))
            for array in (*states, master):
                array.narrow(0, start, length).neg_()
            lp_param.narrow(0, start, length).copy_(part)

    def torch_adam(**flags: bool) -> Step:
        parameter = torch.nn.Parameter(master)
        parameter.grad = wide
        optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.01, **flags)
        optimizer.state[parameter].update(step=torch.tensor(1.0), exp_avg=m, exp_avg_sq=v)

        def step() -> None:
            wide.copy_(gradient).mul_(SCALE)
            optimizer.step()
            lp_param.copy_(master)

        return step

    return {
        COPY: lambda: wide.copy_(master),
        FLOOR: lambda: floor(m, v),
        OURS: lambda: adam(vectors, rule, 5, Applied(SCALE)),
        FLOOR_8: lambda: floor(*packed),
        OURS_8: lambda: adam8(blocks, rule, 5, Applied(SCALE)),
        OURS_SPLIT: lambda: adam(split, rule, 5, Applied(SCALE)),
        FUSED: torch_adam(fused=True),
        FOREACH: torch_adam(foreach=True),
    }


def serve_deepspeed(numel: int, threads: int) -> None:
    """Runs under DeepSpeed's interpreter: one line in, one step, one line out."""
    torch.set_num_threads(threads)
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(torch.zeros(numel))
    wide = parameter.grad = torch.zeros(numel)
    gradient, lp_param = torch.full((numel,), 0.01, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.bfloat16)
    optimizer = DeepSpeedCPUAdam([parameter], lr=1e-3, weight_decay=0.01)

    def step() -> None:
        wide.copy_(gradient).mul_(SCALE)
        optimizer.step()
        lp_param.copy_(parameter.data)

    step()
    sys.stdout.write("READY\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        sys.stdout.write("STEP {} {}\n".format(*timed(step)))
        sys.stdout.flush()


class DeepSpeed:
    """A server of DeepSpeed steps in a separate process."""

    def __init__(self, interpreter: str, numel: int, threads: int) -> None:
        environment = {**os.environ, **oracle_environment(interpreter), "OMP_NUM_THREADS": str(threads)}
        words = [interpreter, "-m", "bench.cpu_adam", "--serve", "--numel", str(numel), "--threads", str(threads)]
        self._process = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read("READY")

    def step(self) -> tuple[float, float]:
        """Wall and CPU seconds of one step in that process."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        wall, cpu = self._read("STEP").split()[1:]
        return float(wall), float(cpu)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    def _read(self, mark: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(mark):
                return line
        raise RuntimeError("DeepSpeed's process ended; can it compile its CPU Adam?")


def measure(numel: int, threads: int, rounds: int, oracle: str | None) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) nanoseconds per parameter, by implementation and round."""
    torch.set_num_threads(threads)
    steps = contenders(numel)
    rival = DeepSpeed(oracle, numel, threads) if oracle else None
    for step in steps.values():
        step()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    if rival is not None:
        found[DEEPSPEED] = []
    for _ in range(rounds):
        for name, step in steps.items():
            found[name].append(timed(step))
        if rival is not None:
            found[DEEPSPEED].append(rival.step())
    if rival is not None:
        rival.close()
    return {name: [(wall / numel * 1e9, cpu / numel * 1e9) for wall, cpu in times] for name, times in found.items()}


def machine(oracle: str | None) -> dict[str, str]:
    """Date, CPU, load, versions and the command, with interpreters by file name only."""
    words = ["python" if Path(word).name.startswith("python") else word for word in sys.argv[1:]]
    versions = [f"torch {torch.__version__}"]
    if oracle:
        code = "from importlib.metadata import version as v; print('deepspeed', v('deepspeed'), 'on torch', v('torch'))"
        answer = subprocess.run([oracle, "-c", code], capture_output=True, text=True, check=True)
        versions.append(answer.stdout.strip())
    place = surroundings.machine()
    return {
        "date": str(datetime.date.today()),
        **{key: str(place[key]) for key in ("cpu", "cores", "load_1min")},
        "versions": ", ".join(versions),
        "command": " ".join(["python -m bench.cpu_adam", *words]),
    }


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table(found: dict[str, list[tuple[float, float]]]) -> str:
    """One row per implementation; ratios are computed within a round."""
    lines = [
        "| way | bytes per parameter | wall ns per parameter | CPU ns per parameter | wall, floor / this | GB/s "
        "| share of copy bandwidth | wall, this / hf_zero |",
        "|---|---|---|---|---|---|---|---|",
    ]
    walls = {name: [wall for wall, _ in times] for name, times in found.items()}
    copy = BYTES[COPY] / statistics.median(walls[COPY])
    for name, times in found.items():
        speed = BYTES[name] / statistics.median(walls[name])
        least = walls[FLOOR_8 if name == OURS_8 else FLOOR]
        of_floor = [floor / wall for floor, wall in zip(least, walls[name], strict=True)]
        to_ours = [wall / ours for ours, wall in zip(walls[OURS], walls[name], strict=True)]
        cpu = spread([cpu for _, cpu in times])
        lines.append(
            f"| {name} | {BYTES[name]} | {spread(walls[name])} | {cpu} | {spread(of_floor)} | {speed:.1f} "
            f"| {speed / copy:.2f} | {spread(to_ours)} |"
        )
    of_cpu = [eight / full for (_, eight), (_, full) in zip(found[OURS_8], found[OURS], strict=True)]
    lines += ["", f"CPU time of 8-bit states to that of fp32 states, round by round: {spread(of_cpu)}."]
    return "\n".join(lines)


def main() -> None:
    """Measure for each number of threads; write a table and the raw figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1 << 26)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--oracle-python", help="interpreter with real DeepSpeed; its CPU Adam compiles on first use")
    parser.add_argument("--name", help="write bench/results/<date>-cpu-adam-<name>.md and .json")
    parser.add_argument("--note", default="", help="a line about the machine for the report")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_deepspeed(options.numel, options.threads[0])
        return
    found = {n: measure(options.numel, n, options.rounds, options.oracle_python) for n in options.threads}
    facts = machine(options.oracle_python)
    about = f"{facts['date']} · {facts['cpu']}, {facts['cores']} cores, load {facts['load_1min']} · {facts['versions']}"
    how = f"`{facts['command']}`: median (min-max) over {options.rounds} rounds."
    parts = [f"# CPU Adam, {options.numel:,} parameters", about, options.note, how]
    parts += [f"## {threads} thread(s)\n\n{table(times)}" for threads, times in found.items()]
    text = "\n\n".join(part for part in parts if part) + "\n"
    sys.stdout.write(text)
    if options.name:
        keep({**facts, "numel": options.numel, "ns_per_parameter": found}, text, f"cpu-adam-{options.name}")


if __name__ == "__main__":
    main()
