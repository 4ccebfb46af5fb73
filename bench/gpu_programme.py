"""What to measure on a GPU that is lent for a quarter of an hour: four blocks, each one command with a time budget.

    python -m bench.gpu_programme --block 1 --minutes 7 --json block1.json    # 1 NCCL, 2 offload, 3 largest, 4 hosts
    python -m bench.gpu_programme --block 1 --device cpu                      # the same, tiny and over gloo
    python -m bench.gpu_programme --block 2 --list                            # parts, cases and what is expected
    python -m bench.gpu_programme --show block1.json [--keep h100-block1]   # the table; --keep stores it as a result

A block has parts in order of their value, and a part has cases. Each part runs in processes of its own. What is
expected of a case is printed and written before it is measured. A case that does not end in time is cut off: its
processes write down their stacks and the collectives that have not ended, and the part goes on with its next case in
new processes. The JSON is written after every case, so a run that is cut off has kept what it had; logs and traces are
beside it.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.surroundings import ROOT, keep, public, rank_environments

BLOCKS = {1: "bench.gpu_nccl", 2: "bench.gpu_costs", 3: "bench.gpu_costs", 4: "bench.gpu_costs"}
START_S = {"cuda": 90.0, "cpu": 240.0}  # of a part's processes, until their first case; a rehearsal shares its cores
STACKS_S = 3.0  # for writing down what a process does, before it is ended
WITHIN = 0.2  # a figure is as predicted if it differs by this share at most
OK, MISS, RAN, NO_TIME, NOT_HERE = "as expected", "MISS", "ran", "no time", "not here"
MARK = "--- "  # before the name of a case in a log
# Two ranks of NCCL on one GPU count as two hosts, and talk by sockets.
AS_HOSTS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_MAX_CTAS": "4"}
GUARDS = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        expected: in words.
        predicted: a figure in `unit`, if the case measures one.
        look: what to look at if the measurement differs.
        limit_s: of the case, without its processes' start.
    """

    name: str
    expected: str
    look: str = ""
    predicted: float | None = None
    unit: str = ""
    limit_s: float = 60.0


@dataclass(frozen=True)
class Part:
    """Cases that run one after the other in the same processes.

    Attributes:
        function: "module:name", called on every rank with (case, place); rank 0's answer is reported.
        ranks: number of processes; 0: the function starts processes by itself.
        environment: of all ranks; `{rank}` in a value becomes the rank.
        apart: every case gets new processes.
        shares: whether several processes use the GPU at a time, so that NVIDIA's MPS helps.
        absent: why the part cannot run here; "" if it can.
    """

    name: str
    function: str
    cases: tuple[Case, ...]
    ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False
    shares: bool = False
    absent: str = ""


@dataclass(frozen=True)
class Found:
    """What a case has measured.

    Attributes:
        holds: whether it is as expected; None if only `value` decides.
        value: the figure that was predicted.
    """

    words: str
    holds: bool | None = None
    value: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where a case runs, as its function sees it.

    Attributes:
        kind: "cuda" or "cpu".
        folder: for files that are kept.
    """

    kind: str
    folder: Path

    @property
    def is_tiny(self) -> bool:
        return self.kind == "cpu"


class NotHere(Exception):
    """A case has no meaning, or no requirements, on this machine."""


@dataclass(frozen=True)
class Row:
    part: str
    case: str
    expected: str
    measured: str
    verdict: str
    look: str = ""
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)


def judged(part: Part, case: Case, found: Found, kind: str, seconds: float) -> Row:
    """The row of a case that has ended."""
    words, verdict = found.words, RAN
    if kind == "cpu" and case.predicted is not None:
        verdict = MISS if found.holds is False else RAN  # the figure is that of a GPU
    elif case.predicted is not None and found.value is not None:
        ratio = found.value / case.predicted
        words += f" ({ratio:.2f} of the prediction)"
        verdict = OK if abs(ratio - 1) <= WITHIN and found.holds is not False else MISS
    elif found.holds is not None:
        verdict = OK if found.holds else MISS
    figures = {**found.figures, **({} if found.value is None else {"value": found.value})}
    return Row(part.name, case.name, case.expected, words, verdict, case.look, seconds, figures)


# --- the processes of a part -------------------------------------------------------------------------------------


def child(words: Sequence[str]) -> None:
    """One rank of a part: runs cases, and rank 0 writes a line when each begins and ends."""
    function, kind, rows, folder, *cases = words
    log = Path(rows).open("a", encoding="utf-8")
    is_first = os.environ.get("RANK", "0") == "0"

    def say(**line: Any) -> None:
        if is_first:
            log.write(json.dumps(line, default=str) + "\n")
            log.flush()

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.getLogger("hf_zero").setLevel(logging.WARNING)
    module, _, name = function.partition(":")
    call: Callable[[str, Place], Found] = getattr(importlib.import_module(module), name)
    _watch_for_the_end(kind)
    place = Place(kind, Path(folder))
    for case in cases:
        say(begins=case)
        sys.stderr.write(f"{MARK}{case}\n")
        try:
            found = call(case, place)
        except NotHere as reason:
            say(ends=case, not_here=str(reason))
            continue
        except Exception as error:
            traceback.print_exc()
            say(ends=case, failed=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
            if int(os.environ.get("WORLD_SIZE", 1)) > 1:
                raise  # the other ranks may be anywhere
            continue
        say(ends=case, found=asdict(found))
        sys.stderr.write(f"{case}: {found.words}\n")
    sys.stdout.flush()


def _watch_for_the_end(kind: str) -> None:
    """On SIGUSR2 a thread writes the collectives that have not ended to stderr: a signal handler would need the main
    thread, which hangs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})

    def wait() -> None:
        signal.sigwait({signal.SIGUSR2})
        from bench.gpu_device import device_of

        for line in device_of(kind).unfinished()[:8]:
            sys.stderr.write(f"not ended: {line}\n")
        sys.stderr.flush()

    threading.Thread(target=wait, daemon=True).start()


@dataclass
class Running:
    """The processes of a part."""

    processes: list[subprocess.Popen[bytes]]
    logs: list[Path]

    @classmethod
    def start(cls, words: Sequence[str], ranks: int, environment: Mapping[str, str], logs: Path) -> Running:
        """`environment`: see `Part`."""
        running = cls([], [])
        for rank, place in enumerate(rank_environments(max(1, ranks))):
            given = {name: value.format(rank=rank) for name, value in environment.items()}
            # All ranks use the first GPU. A single process has no launcher's variables, as a user's would.
            own = {**place, "LOCAL_RANK": "0", **GUARDS, **given} if ranks > 1 else {**os.environ, **GUARDS, **given}
            own["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [own.get("PYTHONPATH")])])
            log = logs.with_name(f"{logs.name}-rank{rank}.log")
            with log.open("wb") as target:
                command = [sys.executable, "-m", *words]
                process = subprocess.Popen(command, env=own, cwd=ROOT, stdout=target, stderr=target)
            running.processes.append(process)
            running.logs.append(log)
        return running

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def show_stacks(self) -> None:
        """Let every process write down where it is."""
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            for process in self.processes:
                if process.poll() is None:
                    process.send_signal(number)
        time.sleep(STACKS_S)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()

    def last_output(self, rank: int) -> str:
        """What a rank's log says of its last case: collectives that have not ended, where it hangs, or an error."""
        said = self.logs[rank].read_text(errors="replace").rpartition(MARK)[2]
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        # The main thread is the last, and need not be the one that got the signal.
        stacks = [f"in {frame}" for line, frame in pairwise(lines) if line.startswith(("Current thread", "Thread 0x"))]
        told = [line for line in lines if line.startswith(("not ended", "this rank exits")) or "Error" in line]
        return ([*stacks[-1:], *told] or lines or ["nothing in its log"])[-1][:300]


class Programme:
    """Runs parts one after the other, and keeps what they have found."""

    def __init__(self, kind: str, minutes: float, file: Path, facts: Mapping[str, Any]) -> None:
        """`file`: the JSON; logs and other files go to the folder beside it."""
        self.kind, self.file = kind, file
        self.rows: list[Row] = []
        self.folder = file.with_suffix(".files")
        self._ends_at = time.monotonic() + 60 * minutes
        self._facts = dict(facts)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    @property
    def left_s(self) -> float:
        return self._ends_at - time.monotonic()

    def note(self, row: Row) -> None:
        self.rows.append(row)
        self._facts = {**row.figures.get("facts", {}), **self._facts}  # those of the first part
        sys.stdout.write(f"[{self.left_s:4.0f} s left] {row.part}, {row.case}: {row.measured}; {row.verdict}\n")
        sys.stdout.flush()
        self.save()

    def save(self) -> None:
        answer = {**self._facts, "rows": [asdict(row) for row in self.rows]}
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(answer, indent=1, default=str) + "\n", encoding="utf-8")
        part.replace(self.file)

    def run(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if part.absent:
                for case in part.cases:
                    self.note(Row(part.name, case.name, case.expected, part.absent, NOT_HERE))
                continue
            left = list(part.cases)
            while left:
                if self.left_s < 5:
                    for case in left:
                        self.note(Row(part.name, case.name, case.expected, "-", NO_TIME))
                    break
                done = self._run_processes(part, left[:1] if part.apart else left)
                left = left[done:]

    def _run_processes(self, part: Part, cases: Sequence[Case]) -> int:
        """Run cases until one does not end; returns how many have a row now."""
        stem = f"{part.name}-{cases[0].name}".replace(" ", "-").replace("/", "-").replace(",", "")
        rows = self.folder / f"{stem}.rows"
        rows.unlink(missing_ok=True)
        rows.touch()
        words = ["bench.gpu_programme", "--child", part.function, self.kind, str(rows.resolve())]
        words += [str(self.folder.resolve()), *(case.name for case in cases)]
        running = Running.start(words, part.ranks, part.environment, self.folder / stem)
        try:
            return self._follow(part, cases, running, rows)
        finally:
            running.end()

    def _follow(self, part: Part, cases: Sequence[Case], running: Running, rows: Path) -> int:
        done, num_lines, began = 0, 0, time.monotonic()
        limit = START_S[self.kind]
        while done < len(cases):
            lines = rows.read_text(encoding="utf-8").splitlines(keepends=True)
            complete = [json.loads(line) for line in lines[num_lines:] if line.endswith("\n")]
            num_lines += len(complete)
            case = cases[done]
            for line in complete:
                case = cases[done]
                if "begins" in line:
                    began, limit = time.monotonic(), case.limit_s
                    continue
                self.note(self._row(part, case, line, time.monotonic() - began))
                done += 1
                if "failed" in line and part.ranks > 1:
                    return done
            if done == len(cases):
                break
            case, codes = cases[done], running.codes()
            seconds = time.monotonic() - began
            ended = [rank for rank, code in enumerate(codes) if code is not None]
            failed = [rank for rank in ended if codes[rank]]
            if failed or len(ended) == len(codes):
                time.sleep(0.5)  # for the last lines, and for other ranks' words
                if rows.read_text(encoding="utf-8").count("\n") > num_lines:
                    continue
                rank = (failed or ended)[0]
                words = f"rank {rank} ended with {codes[rank]}: {running.last_output(rank)}"
                self.note(Row(part.name, case.name, case.expected, words, MISS, self._look(case, running), seconds))
                return done + 1
            if seconds > limit or self.left_s < 0:
                running.show_stacks()
                words = f"no end within {seconds:.0f} s"
                self.note(Row(part.name, case.name, case.expected, words, MISS, self._look(case, running), seconds))
                return done + 1
            time.sleep(0.05)
        deadline = time.monotonic() + 20  # for leaving groups
        while None in running.codes() and time.monotonic() < deadline:
            time.sleep(0.05)
        return done

    def _row(self, part: Part, case: Case, line: Mapping[str, Any], seconds: float) -> Row:
        if "not_here" in line:
            return Row(part.name, case.name, case.expected, line["not_here"], NOT_HERE)
        if "failed" in line:
            return Row(part.name, case.name, case.expected, line["failed"], MISS, case.look, seconds)
        return judged(part, case, Found(**line["found"]), self.kind, seconds)

    def _look(self, case: Case, running: Running) -> str:
        words = "; ".join(f"rank {rank}: {running.last_output(rank)}" for rank in range(len(running.logs)))
        return f"{case.look}; logs {running.logs[0].name} ({words})"


# --- MPS ---------------------------------------------------------------------------------------------------------


class Mps:
    """NVIDIA's multi-process service, with folders of its own; it changes no setting of the card."""

    def __init__(self) -> None:
        self._control = shutil.which("nvidia-cuda-mps-control")
        self._folder: str | None = None

    def start(self) -> Mapping[str, str]:
        """Returns the environment of its clients; nothing if it is not installed or does not start."""
        if self._control is None:
            return {}
        self._folder = tempfile.mkdtemp(prefix="mps-")
        self._environment = {"CUDA_MPS_PIPE_DIRECTORY": self._folder, "CUDA_MPS_LOG_DIRECTORY": self._folder}
        try:
            subprocess.run([self._control, "-d"], env=self._all, check=True, timeout=10, capture_output=True)
        except (OSError, subprocess.SubprocessError):
            return {}
        probe = "import torch; torch.zeros(1, device='cuda').add(1).item()"
        try:
            subprocess.run([sys.executable, "-c", probe], env=self._all, check=True, timeout=30, capture_output=True)
        except (OSError, subprocess.SubprocessError):
            self.end()
            return {}
        return self._environment

    def end(self) -> None:
        if self._control is None or self._folder is None:
            return
        try:
            subprocess.run([self._control], input=b"quit\n", env=self._all, timeout=20, capture_output=True)
        except (OSError, subprocess.SubprocessError):
            sys.stdout.write("MPS does not end\n")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    @property
    def _all(self) -> dict[str, str]:
        return {**os.environ, **self._environment}


# --- the command -------------------------------------------------------------------------------------------------


def parts_of(block: int, kind: str, options: argparse.Namespace) -> list[Part]:
    parts: list[Part] = importlib.import_module(BLOCKS[block]).parts(block, kind, options)
    return parts


def lines_of(run: Mapping[str, Any]) -> list[str]:
    """All rows, then one line for each that is not as expected, and what is known of them since."""
    lines = ["| part | case | expected | measured | verdict |", "|" + " --- |" * 5]
    lines += [
        f"| {row['part']} | {row['case']} | {row['expected']} | {row['measured']} | {row['verdict']} |"
        for row in run["rows"]
    ]
    missed = [row for row in run["rows"] if row["verdict"] == MISS]
    lines += ["", f"{len(missed)} of {len(run['rows'])} are not as expected."]
    lines += [f"- {row['part']}, {row['case']}: look at {row['look']}" for row in missed]
    return lines + (["", *(f"- {note}" for note in run["notes"])] if run.get("notes") else [])


def table(run: Mapping[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in run.items() if name not in ("rows", "expected", "notes"))
    return "\n".join([f"# GPU programme, block {run['block']}", "", facts, "", *lines_of(run), ""])


def parser() -> argparse.ArgumentParser:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--block", type=int, choices=sorted(BLOCKS))
    given.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given.add_argument("--minutes", type=float, default=7.0, help="start nothing, and cut off all, after this time")
    given.add_argument("--json", type=Path, default=Path("out/gpu_programme.json"), help="output file")
    given.add_argument("--parts", nargs="+", help="only these parts")
    given.add_argument("--cases", nargs="+", help="only cases with one of these words, and all first all-reduces")
    given.add_argument("--nccl", type=Path, default=Path("nccl-sm90.so.xz"), help="NCCL 2.30 to load before torch's")
    given.add_argument("--no-mps", action="store_true", help="do not start NVIDIA's MPS where it is installed")
    given.add_argument("--list", action="store_true", help="print parts, cases and what is expected")
    given.add_argument("--show", type=Path, help="print the table of an earlier --json")
    given.add_argument("--keep", metavar="NAME", help="with --show: store it in bench/results")
    given.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return given


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    if options.child:
        child(options.child)
        return
    if options.show:
        run = json.loads(options.show.read_text(encoding="utf-8"))
        if options.keep:
            keep(run, table(run), f"programme-{options.keep}")
        sys.stdout.write(table(run))
        return
    if options.block is None:
        sys.exit("bench.gpu_programme needs --block 1, 2, 3 or 4, or --show FILE")
    parts = parts_of(options.block, options.device, options)
    if options.parts:
        unknown = set(options.parts) - {part.name for part in parts}
        if unknown:
            sys.exit(f"--parts {', '.join(sorted(unknown))}: block {options.block} has {[part.name for part in parts]}")
        parts = [part for part in parts if part.name in options.parts]
    if options.cases:
        words = ("first all-reduce", *options.cases)
        chosen = {part.name: tuple(c for c in part.cases if any(word in c.name for word in words)) for part in parts}
        parts = [replace(part, cases=chosen[part.name]) for part in parts]
    expected = [[part.name, case.name, case.expected, case.predicted] for part in parts for case in part.cases]
    for name, case, words, _ in expected:
        sys.stdout.write(f"expected: {name}, {case}: {words}\n")
    if options.list:
        return
    if options.device == "cuda" and not importlib.import_module("torch").cuda.is_available():
        sys.exit("bench.gpu_programme needs a GPU; without one --device cpu rehearses it")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    words = public(list(sys.argv[1:] if arguments is None else arguments))
    facts = {"block": options.block, "command": " ".join(["python -m bench.gpu_programme", *words])}
    programme = Programme(options.device, options.minutes, options.json, {**facts, "expected": expected})
    # A run that is cut off by `timeout` ends the processes that it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("cut off; the JSON has what was measured"))
    mps = Mps()
    shared = mps.start() if options.device == "cuda" and not options.no_mps and any(p.shares for p in parts) else {}
    try:
        programme.run([replace(p, environment={**p.environment, **shared}) if p.shares else p for p in parts])
    finally:
        mps.end()
    sys.stdout.write("\n" + table(json.loads(options.json.read_text(encoding="utf-8"))))
    sys.exit(1 if any(row.verdict == MISS for row in programme.rows) else 0)


if __name__ == "__main__":
    # The module that parts import, not a second one.
    importlib.import_module("bench.gpu_programme").main()
