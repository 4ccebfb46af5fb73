"""One trial: a config, written down, run through the real launcher, and what came of it. Running out of memory is a
result like any other."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["ok", "out of memory", "failed", "ran too long"]

TIMEOUT_S = 3600.0
_MEMORY = ("out of memory", "OutOfMemoryError", "MemoryError", "DoesNotFit", "can't allocate memory", "bad_alloc")
_KILLED = (-9, 137)  # by the system, out of host memory


@dataclass(frozen=True, slots=True)
class Experiment:
    """One trial.

    Attributes:
        config: ds.json.
        command: words that come after `python -m hf_zero launch`, without the config.
        place: index of the config's path in `command`.
    """

    name: str
    config: Mapping[str, Any]
    command: tuple[str, ...]
    place: int


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a trial.

    Attributes:
        metrics: `latency` (seconds per update), `throughput` (samples per second); empty without success.
        reason: the last line of an error.
    """

    name: str
    outcome: Outcome
    metrics: Mapping[str, float]
    reason: str = ""


def run_experiment(experiment: Experiment, folder: Path, *, profile: tuple[int, int], again: bool = True) -> Result:
    """Run it in `folder`/NAME, and leave config, command, output and metrics there.

    Args:
        profile: updates (first, last) between which a trial is timed.
        again: also when its metrics are there already.
    """
    home = (folder / experiment.name).resolve()
    home.mkdir(parents=True, exist_ok=True)
    metrics = home / "metrics.json"
    if metrics.exists() and not again:
        return Result(experiment.name, "ok", json.loads(metrics.read_text(encoding="utf-8")))
    metrics.unlink(missing_ok=True)
    section = {"enabled": True, "metric_path": str(metrics)}
    section |= {"start_profile_step": profile[0], "end_profile_step": profile[1]}
    config = home / "ds_config.json"
    _write_json(config, {**experiment.config, "autotuning": section})
    _write_json(home / "exp.json", {"name": experiment.name, "ds_config": dict(experiment.config)})
    command = with_config(experiment.command, experiment.place, str(config))
    (home / "cmd.txt").write_text(shlex.join(["hf-zero", "launch", *command]) + "\n", encoding="utf-8")
    status = _run(command, home)
    if metrics.exists():
        return Result(experiment.name, "ok", json.loads(metrics.read_text(encoding="utf-8")))
    stdout, stderr = ((home / name).read_text(errors="replace") for name in ("stdout.log", "stderr.log"))
    outcome, reason = judge(status, stdout, stderr)
    return Result(experiment.name, outcome, {}, reason)


def with_config(command: Sequence[str], place: int, path: str) -> list[str]:
    """The words with another config; `--deepspeed=ds.json` is one word."""
    words = list(command)
    flag, equals, _ = words[place].partition("=")
    words[place] = f"{flag}={path}" if equals and flag.startswith("--") else path
    return words


def judge(status: int | None, said: str, complained: str) -> tuple[Outcome, str]:
    """The cause of death of a run without metrics."""
    if status is None:
        return "ran too long", ""
    lines = [line.strip() for line in (*said.splitlines(), *complained.splitlines()) if line.strip()]
    about_memory = [line for line in lines if any(word in line for word in _MEMORY)]
    if about_memory:
        return "out of memory", about_memory[-1][:300]
    if status in _KILLED or any("signal 9" in line or "SIGKILL" in line for line in lines):
        return "out of memory", "killed by the system"
    if status == 0:
        return "failed", "ended before enough updates; lower autotuning.end_profile_step, or train longer"
    return "failed", lines[-1][:300] if lines else f"exit status {status}"


def _run(command: Sequence[str], home: Path) -> int | None:
    """Exit status; None: it was ended after TIMEOUT_S."""
    with (home / "stdout.log").open("w") as out, (home / "stderr.log").open("w") as err:
        words = [sys.executable, "-m", "hf_zero", "launch", *command]
        process = subprocess.Popen(words, stdout=out, stderr=err, env=os.environ.copy())
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                process.terminate()  # the launcher ends its ranks
                process.wait()


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")
