"""The command `explain`: its arguments, report and output.

`mend` implements `explain --fix`: it fixes every problem of a config that needs no decision by the user.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hf_zero.config import ConfigDict, ConfigError, Findings, Problem, Views, examine, load_config
from hf_zero.config.errors import ABSENT, Edit, Remark
from hf_zero.config.errors import show as short
from hf_zero.config.extras import loaded
from hf_zero.config.fill import SIZED_BY_MODEL
from hf_zero.config.schema.fields import Verdict, all_paths, section_of, verdict_of
from hf_zero.explain.views import (
    Links,
    Sent,
    left_aside,
    model_view_by_name,
    number_of,
    traffic_rows,
    training_view_from_flags,
)
from hf_zero.integration.huggingface.views import launch_view
from hf_zero.log import table_console

LATER = "filled when training starts"
_LEAST_EFFECT = 24  # minimum readable width of this column in characters
_BORDERS = 13
_BY_TRAINER = ("train_", "gradient_accumulation_steps", "gradient_clipping", "fp16.enabled", "bf16.enabled")


@dataclass(frozen=True, slots=True)
class Row:
    """One key of the config."""

    key: str
    value: object
    source: str
    effect: str
    matters: bool = True  # has an effect at this stage, or was set


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of `explain`."""

    name: str
    stage: int | None = None
    rows: tuple[Row, ...] = ()
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    traffic: tuple[Sent, ...] = ()


def report_on(
    findings: Findings,
    *,
    name: str,
    extra_notes: Sequence[str] = (),
    everything: bool = False,
    traffic: tuple[Sent, ...] = (),
) -> Report:
    zero = findings.config.zero_optimization
    stage = zero.stage if zero is not None else 0
    order = {path: place for place, path in enumerate(all_paths(type(findings.config)))}
    rows = [row for row in _rows(findings, stage) if everything or row.matters]
    # Arguments of optimizer and schedule follow their section.
    rows.sort(key=lambda row: order.get(row.key, order.get(row.key.rpartition(".")[0], 0)))
    kept = [note for note in findings.notes if '"auto" was not filled' not in note]
    absent = [f"{one.path} = {short(one.value)} {one.rule}: {one.fix}" for one in findings.absent_folders()]
    return Report(
        name=name,
        stage=stage,
        rows=tuple(rows),
        problems=findings.problems,
        warnings=(*findings.warnings, *absent),
        notes=(*kept, *extra_notes),
        traffic=traffic,
    )


def _rows(findings: Findings, stage: int) -> Iterator[Row]:
    open_keys = set(findings.autos)
    for path, entry in findings.provenance.items():
        if path in open_keys:
            continue
        effect, works = _effect(findings, path, stage)
        was_set = entry.source.kind != "default"
        matters = (was_set or (works and entry.value is not None)) and entry.value != {}
        yield Row(path, entry.value, str(entry.source), effect, matters)
    for path in sorted(open_keys):
        yield Row(path, "auto", _who_fills(path), _effect(findings, path, stage)[0])


def _who_fills(path: str) -> str:
    if path in SIZED_BY_MODEL:
        return f"{LATER} (or give --model)"
    if path.startswith(("scheduler.params", "optimizer.params")) or path.startswith(_BY_TRAINER):
        return f"{LATER} (or give Trainer's flags)"
    return "not filled in: the default"


def _effect(findings: Findings, path: str, stage: int) -> tuple[str, bool]:
    """A description of a key's effect, and whether it has one."""
    *parents, name = path.split(".")
    for name_of_section, section in (
        ("optimizer", findings.config.optimizer),
        ("scheduler", findings.config.scheduler),
    ):
        if parents == [name_of_section, "params"]:
            return f"argument of {(section and section.type) or 'the ' + name_of_section}", True
    section_class = section_of(type(findings.config), parents)
    field = section_class.model_fields.get(name) if section_class else None
    if section_class is None and parents:
        return _effect(findings, ".".join(parents), stage)  # inside a section that is rejected or passed through
    if field is None:
        return "", True
    verdict = verdict_of(field)
    return _verdict_words(verdict, stage) or field.description or "", not _verdict_words(verdict, stage)


def _verdict_words(verdict: Verdict, stage: int) -> str:
    if verdict.kind == "ignored":
        return f"no effect: {verdict.why}"
    if verdict.kind == "unsupported":
        return f"not available: {verdict.why}"
    if stage not in verdict.stages:
        stages = ", ".join(map(str, verdict.stages))
        return f"no effect at stage {stage} (works at {stages})"
    return ""


def as_json(report: Report) -> str:
    """The report as JSON: settings, problems and notes."""
    settings = [{"key": row.key, "value": row.value, "source": row.source, "effect": row.effect} for row in report.rows]
    content = {
        "config": report.name,
        "stage": report.stage,
        "settings": settings,
        "problems": [_problem(problem) for problem in report.problems],
        "warnings": list(report.warnings),
        "notes": list(report.notes),
        "traffic": [dataclasses.asdict(sent) for sent in report.traffic],
    }
    return json.dumps(content, indent=2, default=str)


def _problem(problem: Problem) -> dict[str, Any]:
    other = problem.other
    return {
        "key": problem.path,
        "value": None if problem.value is ABSENT else problem.value,
        "source": problem.origin,
        "other": None if other is None else {"name": other.name, "value": other.value, "source": other.origin},
        "rule": problem.rule,
        "fix": problem.fix,
    }


def show(report: Report, console: Console | None = None) -> None:
    console = console or table_console()
    if report.rows:
        _show_rows(report, console)
    if report.traffic:
        _show_traffic(report, console)
    for number, problem in enumerate(report.problems, 1):
        console.print(f"[bold red]problem {number}[/]: {escape(str(problem))}", soft_wrap=True)
    for warning in report.warnings:
        console.print(f"[yellow]warning: {escape(warning)}[/]", soft_wrap=True)
    for note in report.notes:
        console.print(f"[dim]note: {escape(note)}[/]", soft_wrap=True)
    count = len(report.problems)
    verdict = f"[bold red]{count} problem{'s' * (count != 1)}[/]" if count else "[bold green]no problems[/]"
    console.print(f"{escape(report.name)}: {verdict}", soft_wrap=True)


def _show_rows(report: Report, console: Console) -> None:
    """Print a table if keys, values and sources leave enough space for the effect, else one entry below the other."""
    title = f"{escape(report.name)} at ZeRO stage {report.stage}"
    columns = zip(*((row.key, _shown(row.value), row.source) for row in report.rows))
    taken = sum(max(map(len, column)) for column in columns) + _BORDERS
    if taken + _LEAST_EFFECT <= console.width:
        console.print(_table(report, title))
        return
    console.print(title)
    for row in report.rows:
        # Do not wrap, so that keys can be searched for.
        console.print(f"{escape(row.key)} = {escape(_shown(row.value))}", style=_style(row), soft_wrap=True)
        console.print(f"    from {escape(row.source)}", style=_style(row), soft_wrap=True)
        if row.effect:
            console.print(Padding(Text(row.effect, style=_style(row)), (0, 0, 0, 4)))


def _table(report: Report, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("key", "value", "source"):
        table.add_column(name, no_wrap=True)
    table.add_column("effect", ratio=1)
    for row in report.rows:
        cells = (row.key, _shown(row.value), row.source, row.effect)
        table.add_row(*map(escape, cells), style=_style(row))
    return table


def _show_traffic(report: Report, console: Console) -> None:
    in_bytes = report.traffic[0].seconds is not None
    unit = "GB" if in_bytes else "models, in the dtype of its weights"
    title = f"what a rank receives, and sends, per update ({unit})"
    table = Table(title=title, title_justify="left")
    for name in ("with", "within hosts", "across", *(["seconds"] if in_bytes else [])):
        table.add_column(name, no_wrap=True, justify="left" if name == "with" else "right")
    scale = 1e-9 if in_bytes else 1.0
    for sent in report.traffic:
        cells = [f"{sent.within * scale:.3f}", f"{sent.across * scale:.3f}"]
        seconds = [] if sent.seconds is None else [f"{sent.seconds:.4f}"]
        table.add_row(escape(sent.name), *cells, *seconds)
    console.print(table)


def _style(row: Row) -> str:
    return "dim" if row.source == "default" else "yellow" if row.value == "auto" else ""


def _shown(value: object) -> str:
    return value if isinstance(value, str) else _value(value)


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    return f"{value:,}".replace(",", "_") if isinstance(value, int) and not isinstance(value, bool) else short(value)


_ROUNDS = 20  # a key may have another problem under its correct name, or with its correct value


def mend(config: ConfigDict, views: Views, *, ranks_known: bool = True) -> tuple[dict[str, Any], list[str]]:
    """A fixed copy of the config as plain dicts, and a line for every change.

    Args:
        ranks_known: whether the number of ranks is known; otherwise, inconsistent batch sizes may be correct for the
            actual number.
    """
    mended: dict[str, Any] = copy.deepcopy(dict(config))
    changes: list[str] = []  # each once: two rules that contradict each other end
    for _ in range(_ROUNDS):
        for edits in _edits(examine(mended, views, complete=False)):
            open_edits = [
                edit
                for edit in edits
                if (ranks_known or edit.path != ("train_batch_size",) or edit.to) and str(edit) not in changes
            ]
            done = [str(edit) for edit in open_edits if _apply(mended, edit)]
            changes += done
            if done:
                break  # what else there is to say may have changed
        else:
            break
    return mended, changes


def _edits(findings: Findings) -> tuple[list[Edit], ...]:
    """The edits of names, then of other problems, then of remarks; the first of each key. A remark only removes a key
    that is ignored: perhaps because of a wrong stage."""
    first: dict[tuple[str, ...], tuple[Edit, bool]] = {}
    in_order: list[Problem | Remark] = [*findings.problems, *findings.remarks]
    for finding in in_order:
        edit, is_remark = finding.edit, isinstance(finding, Remark)
        if edit is None:
            continue
        if not isinstance(finding, Remark) or finding.ignored or edit.to or edit.value is not ABSENT:
            first.setdefault(edit.path, (edit, is_remark))
    names = [edit for edit, _ in first.values() if edit.to]
    others = [(edit, is_remark) for edit, is_remark in first.values() if not edit.to]
    return names, [edit for edit, of in others if not of], [edit for edit, of in others if of]


def _apply(config: dict[str, Any], edit: Edit) -> bool:
    """Apply an edit; returns False if it changes nothing, its key does not exist or the new key is already set."""
    key, sets = edit.path[-1], not edit.to and edit.value is not ABSENT
    holder = _holder(config, edit.path, make=sets)
    if holder is None or (key not in holder and not sets):
        return False
    if sets:
        changes, holder[key] = key not in holder or holder[key] != edit.value, edit.value
        return changes
    if not edit.to:
        del holder[key]
        return True
    target = _holder(config, edit.to, make=True)
    if target is None or target.get(edit.to[-1]) is not None:
        return False
    written = holder.pop(key)
    target[edit.to[-1]] = written if edit.value is ABSENT else edit.value
    return True


def _holder(config: dict[str, Any], path: tuple[str, ...], *, make: bool = False) -> dict[str, Any] | None:
    holder = config
    for key in path[:-1]:
        inner = holder.setdefault(key, {}) if make else holder.get(key)
        if not isinstance(inner, dict):
            return None
        holder = inner
    return holder


def write_mended(config: dict[str, Any], target: Path) -> None:
    """Write the config to a new file; an existing file is never overwritten.

    Raises:
        ConfigError: if it cannot be written.
    """
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=4) + "\n")
    except FileExistsError:
        raise ConfigError(Problem("--fix", str(target), "it already exists", "name another, or remove it")) from None
    except OSError as error:
        rule = f"it cannot be written: {error.strerror}"
        raise ConfigError(Problem("--fix", str(target), rule, "name another")) from None


def default_target(name: str) -> Path:
    """ds.json -> ds.fixed.json in the same folder; in the working directory if the config was given as text."""
    path = Path(name or "ds.json")
    return path.with_name(f"{path.stem}.fixed.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `explain`; all other flags are treated as those of TrainingArguments."""
    parser.add_argument("config", help="ds.json: a path, JSON text, or base64 of it")
    parser.add_argument("--model", help="folder, config.json or hub name of the model, for values that depend on it")
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks (default: 1)")
    traffic = parser.add_argument_group("traffic per update")
    traffic.add_argument("--gpus-per-node", type=int, metavar="N", help="ranks per host (default: all)")
    traffic.add_argument("--parameters", metavar="COUNT", help="parameters of the model, like 7b, to show bytes")
    traffic.add_argument("--link", metavar="SIZE", help="bytes per second between ranks of a host (370G)")
    traffic.add_argument("--network", metavar="SIZE", help="bytes per second to other hosts, for one rank (40G)")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--all", action="store_true", help="also show keys without effect at this stage")
    parser.add_argument(
        "--fix", "--fix-to", nargs="?", const="", metavar="FILE",
        help="write a fixed copy to FILE (default: ds.fixed.json next to ds.json); never overwrites a file",
    )  # fmt: skip
    parser.usage = (
        "%(prog)s ds.json [TrainingArguments flags...] [--model M] [--world-size N] [--json] [--all] [--fix [FILE]]"
    )


def run(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print the report; returns 1 if there are problems."""
    report = _report(arguments, flags)
    if arguments.json:
        sys.stdout.write(as_json(report) + "\n")
    else:
        show(report)
    return 1 if report.problems else 0


def _report(arguments: argparse.Namespace, flags: Sequence[str]) -> Report:
    problems: list[Problem] = []
    notes: list[str] = []
    try:
        config = load_config(arguments.config)
        own = argparse.ArgumentParser(add_help=False)
        add_arguments(own)
        training, unused = training_view_from_flags(flags, also=own._option_string_actions)
        notes += map(left_aside, unused)
        model = model_view_by_name(arguments.model)
        world_size = 1 if arguments.world_size is None else arguments.world_size
        views = Views(world_size=world_size, training=training, accelerator=launch_view(os.environ), model=model)
        name = config.name or "the config given"
        if arguments.fix is not None:
            mended, changes = mend(config, views, ranks_known=arguments.world_size is not None)
            notes += [f"--fix: {change}" for change in changes]
            if changes:
                target = Path(arguments.fix) if arguments.fix else default_target(config.name)
                write_mended(mended, target)
                notes.append(f"the fixed config is in {target}; comments are not preserved")
                config, name = load_config(target), str(target)
            else:
                notes.append("--fix: nothing to fix that needs no decision; no file was written")
        findings = examine(config, views, complete=False)
        if arguments.world_size is None and any(problem.path == "train_batch_size" for problem in findings.problems):
            notes.append("train_batch_size was checked for 1 rank: give the number of ranks with --world-size N")
        traffic = _traffic(findings, arguments)
        for extra in findings.config.features if not findings.problems else ():
            if "explain" in extra.services and extra.name in findings.extras:
                words, wrong = loaded(extra.services["explain"])(findings, arguments.model)
                notes += words
                findings = dataclasses.replace(findings, problems=(*findings.problems, *wrong))
    except ConfigError as error:
        problems += error.problems
        return Report(name=str(arguments.config)[:200], problems=tuple(problems), notes=tuple(notes))
    return report_on(findings, name=name, extra_notes=notes, everything=arguments.all, traffic=traffic)


def _traffic(findings: Findings, arguments: argparse.Namespace) -> tuple[Sent, ...]:
    links, parameters = Links(), None
    if arguments.link is not None:
        links = dataclasses.replace(links, within=number_of(arguments.link, "--link"))
    if arguments.network is not None:
        links = dataclasses.replace(links, across=number_of(arguments.network, "--network"))
    if arguments.parameters is not None:
        parameters = number_of(arguments.parameters, "--parameters")
    return traffic_rows(findings, arguments.gpus_per_node, parameters, links)
