"""`hf-zero launch --autotuning tune|run`: finds the best stage and micro-batch by short runs of the user's script.

    for each stage, in order:   micro-batch m, 2m, 4m ...      until out of memory, or a larger one gains less than 5%
    best trial                  summary.txt, ds_config_optimal.json, cmd_optimal.txt; with `run` it then trains

Learning rate and accumulation stay as given. A trial that runs out of memory only ends the trials of its stage.
"""

from __future__ import annotations

import copy
import json
import random
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_zero.config import ConfigError, Problem, Views, examine, load_config
from hf_zero.extras.autotuning import Autotuning
from hf_zero.launch.children import run
from hf_zero.log import table_console

Outcome = Literal["ok", "out of memory", "failed", "ran too long"]

TIMEOUT_S = 3600.0
_MEMORY = ("out of memory", "OutOfMemoryError", "MemoryError", "DoesNotFit", "can't allocate memory", "bad_alloc")
_KILLED = (-9, 137)  # by the system, out of host memory


@dataclass(frozen=True, slots=True)
class Experiment:
    """One trial.

    Attributes:
        config: the content of ds.json.
        command: arguments of `python -m hf_zero launch`; the config's path is replaced.
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

    experiment: Experiment
    outcome: Outcome
    metrics: Mapping[str, float]
    reason: str = ""


def run_experiment(experiment: Experiment, folder: Path, *, profile: tuple[int, int], again: bool = True) -> Result:
    """Run a trial in `folder`/NAME, and write its config, command, output and metrics there.

    Args:
        profile: updates (first, last) between which a trial is timed.
        again: run it even if its metrics exist.
    """
    home = (folder / experiment.name).resolve()
    home.mkdir(parents=True, exist_ok=True)
    metrics = home / "metrics.json"
    if metrics.exists() and not again:
        return Result(experiment, "ok", json.loads(metrics.read_text(encoding="utf-8")))
    metrics.unlink(missing_ok=True)
    section = {"enabled": True, "metric_path": str(metrics)}
    section |= {"start_profile_step": profile[0], "end_profile_step": profile[1]}
    config = home / "ds_config.json"
    _write_json(config, {**experiment.config, "autotuning": section})
    _write_json(home / "exp.json", {"name": experiment.name, "ds_config": dict(experiment.config)})
    command = with_config(experiment.command, experiment.place, str(config))
    _write_command(home / "cmd.txt", command)
    status = _exit_status(command, home)
    if metrics.exists():
        return Result(experiment, "ok", json.loads(metrics.read_text(encoding="utf-8")))
    stdout, stderr = ((home / name).read_text(errors="replace") for name in ("stdout.log", "stderr.log"))
    outcome, reason = judge(status, stdout, stderr)
    return Result(experiment, outcome, {}, reason)


def with_config(command: Sequence[str], place: int, path: str) -> list[str]:
    """The command with another config path, which may be part of an argument such as `--deepspeed=ds.json`."""
    words = list(command)
    flag, equals, _ = words[place].partition("=")
    words[place] = f"{flag}={path}" if equals and flag.startswith("--") else path
    return words


def judge(status: int | None, said: str, complained: str) -> tuple[Outcome, str]:
    """The outcome and reason of a run that wrote no metrics, from its exit status and output."""
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


def _exit_status(command: Sequence[str], home: Path) -> int | None:
    """Run the launcher and return its exit status; None if it was ended after TIMEOUT_S."""
    with (home / "stdout.log").open("w") as out, (home / "stderr.log").open("w") as err:
        words = [sys.executable, "-m", "hf_zero", "launch", *command]
        return run(words, timeout_s=TIMEOUT_S, stdout=out, stderr=err)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")


def _write_command(path: Path, command: Sequence[str]) -> None:
    path.write_text(shlex.join(["hf-zero", "launch", *command]) + "\n", encoding="utf-8")


GAIN = 1.05  # minimum gain of a larger micro-batch for trying an even larger one
_MICRO = "train_micro_batch_size_per_gpu"
_FLAGS = ("--deepspeed", "--deepspeed_config", "--deepspeed_config_file")
_BUCKETS = (50_000_000, 500_000_000)
_SEED = 0


@dataclass(frozen=True, slots=True)
class Search:
    """The input of a search.

    Attributes:
        raw: the user's ds.json, which may contain lists of candidates.
        command: arguments of `hf-zero launch`, without `--autotuning`.
        place: index of the config's path in `command`.
        batch_flag: the script's flag for the micro-batch, if any.
    """

    raw: Mapping[str, Any]
    section: Autotuning
    command: tuple[str, ...]
    place: int
    batch_flag: str | None

    @property
    def folder(self) -> Path:
        return Path(self.section.results_dir)


def tune(words: Sequence[str], num_script_words: int, *, then_run: bool) -> int:
    """Search, and with `then_run` train with the best config. Returns the exit status.

    Args:
        words: arguments of `hf-zero launch`, without `--autotuning`.
        num_script_words: number of trailing arguments that are the script and its arguments.

    Raises:
        ConfigError: if the config does not enable the search, or is invalid.
    """
    search = read_search(words, num_script_words)
    if search.section.overwrite and search.folder.exists():
        shutil.rmtree(search.folder)
    search.folder.mkdir(parents=True, exist_ok=True)
    results = [*run_search(search)]
    best = best_of(results, search.section.metric)
    write_results(search, results, best)
    show_results(results, best, search.section.metric)
    if best is None:
        return 1
    if not then_run:
        return 0
    command = with_config(best.experiment.command, search.place, str(search.folder / "ds_config_optimal.json"))
    return run([sys.executable, "-m", "hf_zero", "launch", *command]) or 0


def read_search(words: Sequence[str], num_script_words: int) -> Search:
    """The search defined by command line and ds.json."""
    place = _place_of_config(words, len(words) - num_script_words)
    path = words[place].partition("=")[2] if words[place].startswith("--") else words[place]
    raw = dict(load_config(path))
    findings = examine({"train_batch_size": 1, "autotuning": raw.get("autotuning") or {}}, Views(world_size=1))
    problems = [problem for problem in findings.problems if problem.path.startswith("autotuning")]
    section: Autotuning | None = vars(findings.config)["autotuning"]
    if problems or section is None or not section.enabled:
        rule = "the config must enable autotuning, too"
        asked = Problem("autotuning.enabled", False, rule, 'write "autotuning": {"enabled": true} into the config')
        raise ConfigError(problems or [asked])
    flag = (section.arg_mappings or {}).get(_MICRO)
    known = "--per_device_train_batch_size"
    if flag is None and (raw.get(_MICRO) == "auto" or any(word.startswith(known) for word in words)):
        flag = known
    return Search(raw, section, tuple(words), place, None if flag is None else str(flag))


def _place_of_config(words: Sequence[str], start: int) -> int:
    for index in range(start, len(words)):
        flag, equals, value = words[index].partition("=")
        if flag in _FLAGS and equals and value.endswith(".json"):
            return index
        if words[index] in _FLAGS and index + 1 < len(words) and words[index + 1].endswith(".json"):
            return index + 1
    rule = f"the script's arguments name no config: one of {', '.join(_FLAGS)} with a .json"
    raise ConfigError(Problem("--autotuning", "tune or run", rule, "add --deepspeed ds.json after the script"))


def run_search(search: Search) -> Iterator[Result]:
    """Run trials until the limits of the config section are reached."""
    section, best, since = search.section, None, 0
    stages = stages_of(search.raw)
    if section.tuner_type == "random":
        random.Random(_SEED).shuffle(stages)
    done: list[Result] = []
    for result in _all_trials(search, stages):
        done.append(result)
        yield result
        value = score(result, section.metric)
        is_better = value is not None and (best is None or value > best)
        best, since = (value, 0) if is_better else (best, since + 1)
        if len(done) >= section.tuner_num_trials or since >= section.tuner_early_stopping:
            return
    top = best_of(done, section.metric)
    if section.fast or top is None:
        return
    for numel in _BUCKETS:
        config = copy.deepcopy(dict(top.experiment.config))
        config.setdefault("zero_optimization", {})["reduce_bucket_size"] = numel
        yield _run(search, replace(top.experiment, name=f"{top.experiment.name}_rbs{numel:.0e}", config=config))


def _all_trials(search: Search, stages: Sequence[int]) -> Iterator[Result]:
    for stage in stages:
        last: float | None = None
        for micro in micro_batches(search):
            result = _run(search, experiment_of(search, stage, micro))
            yield result
            rate = result.metrics.get("throughput")
            if rate is None or (last is not None and rate < last * GAIN and not _fixed(search)):
                break
            last = rate


def _run(search: Search, experiment: Experiment) -> Result:
    section = search.section
    profile = max(1, section.start_profile_step), section.end_profile_step
    return run_experiment(experiment, search.folder, profile=profile, again=section.overwrite)


def stages_of(raw: Mapping[str, Any]) -> list[int]:
    """The stages to try: `zero_optimization.stage` as a number, a list, or "all", which is the default."""
    stage = (raw.get("zero_optimization") or {}).get("stage", "all")
    stages = [0, 1, 2, 3] if stage == "all" else stage if isinstance(stage, list) else [stage]
    return [int(each) for each in stages]


def micro_batches(search: Search) -> Sequence[int | None]:
    """Micro-batches to try, ascending; [None] if the script fixes its own."""
    section, given = search.section, search.raw.get(_MICRO)
    if _fixed(search):
        return sorted(int(size) for size in given)  # type: ignore[union-attr]
    if search.batch_flag is None and not isinstance(given, int):
        return [None]
    start = section.min_train_micro_batch_size_per_gpu
    if start == 1:
        start = int(given) if isinstance(given, int) else _flag_value(search) or 1
    sizes = [start * 2**n for n in range(section.num_tuning_micro_batch_sizes)]
    most = section.max_train_micro_batch_size_per_gpu
    if section.max_train_batch_size is not None:
        most = min(most, section.max_train_batch_size)
    return [size for size in sizes if size <= most] or [most]


def _fixed(search: Search) -> bool:
    return isinstance(search.raw.get(_MICRO), list)


def _flag_value(search: Search) -> int | None:
    words = search.command
    for index, word in enumerate(words):
        flag, equals, value = word.partition("=")
        text = value if equals else words[index + 1] if index + 1 < len(words) else ""
        if flag == search.batch_flag and text.isdigit():
            return int(text)
    return None


def experiment_of(search: Search, stage: int, micro: int | None) -> Experiment:
    """The user's config and command with this stage and this micro-batch."""
    config = copy.deepcopy(dict(search.raw))
    config.pop("autotuning", None)
    config["zero_optimization"] = {**(config.get("zero_optimization") or {}), "stage": stage}
    command, place, name = list(search.command), search.place, f"z{stage}"
    if micro is not None:
        name += f"_tmbspg{micro}"
        if config.get(_MICRO) != "auto":
            config[_MICRO] = micro
            if config.get("train_batch_size") != "auto":
                config.pop("train_batch_size", None)  # it follows from the micro-batch; accumulation stays
        if search.batch_flag is not None:
            command = with_flag(command, search.batch_flag, str(micro))
    return Experiment(name, config, tuple(command), place)


def with_flag(command: Sequence[str], flag: str, value: str) -> list[str]:
    """The command with the flag set to this value, or appended to it."""
    words = list(command)
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            words[index + 1] = value
            return words
        if word.startswith(f"{flag}="):
            words[index] = f"{flag}={value}"
            return words
    return [*words, flag, value]


def score(result: Result, metric: str) -> float | None:
    """The score of a result, where higher is better; None without metrics."""
    value = result.metrics.get(metric)
    return None if value is None else -value if metric == "latency" else value


def best_of(results: Sequence[Result], metric: str) -> Result | None:
    """The best result, the first one in case of ties; None if no trial completed."""
    scored = [(value, result) for result in results if (value := score(result, metric)) is not None]
    return max(scored, key=lambda entry: entry[0])[1] if scored else None


def write_results(search: Search, results: Sequence[Result], best: Result | None) -> None:
    """Write summary.txt, and ds_config_optimal.json and cmd_optimal.txt of the best trial."""
    folder, metric = search.folder, search.section.metric
    rows = [
        f"| {result.experiment.name} | {result.outcome} | {_amount(result.metrics.get(metric))} | {result.reason} |"
        for result in results
    ]
    text = "\n".join([f"| trial | outcome | {metric} | reason |", "| --- | --- | --- | --- |", *rows])
    name = best.experiment.name if best else "none"
    (folder / "summary.txt").write_text(f"{text}\n\nbest: {name}\n", encoding="utf-8")
    if best is None:
        return
    config, experiment = folder / "ds_config_optimal.json", best.experiment
    _write_json(config, experiment.config)
    _write_command(folder / "cmd_optimal.txt", with_config(experiment.command, experiment.place, str(config)))


def show_results(results: Sequence[Result], best: Result | None, metric: str) -> None:
    rows = []
    for result in results:
        numbers = [_amount(result.metrics.get(key)) for key in ("throughput", "latency")]
        rows.append((result is best, [result.experiment.name, result.outcome, *numbers, escape(result.reason)]))
    console = show_table("autotuning", ("trial", "outcome", "samples/s", "s per update", "reason"), rows)
    console.print(f"best by {metric}: {best.experiment.name}" if best else "no trial has completed")


def show_table(title: str, columns: Sequence[str], rows: Iterable[tuple[bool, Sequence[str]]]) -> Console:
    """Print a table. `rows`: whether a row is the best one, and its cells."""
    table = Table(*columns, title=title, title_justify="left")
    for is_best, cells in rows:
        table.add_row(*cells, style="bold green" if is_best else "")
    console = table_console()
    console.print(table)
    return console


def _amount(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
