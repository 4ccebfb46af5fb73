"""What `explain` shows: one row per key, then problems and remarks; as a table or as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hf_zero.config import Findings, Problem
from hf_zero.config.errors import ABSENT
from hf_zero.config.errors import show as short
from hf_zero.config.offers import SIZED_BY_MODEL
from hf_zero.config.schema import Verdict
from hf_zero.config.schema.fields import all_paths, section_of, verdict_of
from hf_zero.explain.views import Sent

LATER = "filled when training starts"
WIDTH_IN_FILES = 150
_LEAST_EFFECT = 24  # characters; narrower is not read any more
_BORDERS = 13
_BY_TRAINER = ("train_", "gradient_accumulation_steps", "gradient_clipping", "fp16.enabled", "bf16.enabled")


@dataclass(frozen=True, slots=True)
class Row:
    """One key."""

    key: str
    value: object
    source: str
    effect: str
    matters: bool = True  # has an effect at this stage, or was set by somebody


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that is to be told."""

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
    """The report of a config that was examined."""
    zero = findings.config.zero_optimization
    stage = zero.stage if zero is not None else 0
    order = {path: place for place, path in enumerate(all_paths(type(findings.config)))}
    rows = [row for row in _rows(findings, stage) if everything or row.matters]
    # Arguments of optimizer and schedule follow their section.
    rows.sort(key=lambda row: order.get(row.key, order.get(row.key.rpartition(".")[0], 0)))
    kept = [note for note in findings.notes if '"auto" was not filled' not in note]
    return Report(
        name=name,
        stage=stage,
        rows=tuple(rows),
        problems=findings.problems,
        warnings=findings.warnings,
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
    """In words, and whether there is one."""
    *parents, name = path.split(".")
    for section, policy in (("optimizer", findings.optimizer), ("scheduler", findings.scheduler)):
        if parents == [section, "params"]:
            return f"argument of {policy.type if policy else 'the ' + section}", True
    section_class = section_of(type(findings.config), parents)
    field = section_class.model_fields.get(name) if section_class else None
    if section_class is None and parents:
        return _effect(findings, ".".join(parents), stage)  # inside a section that is refused, or taken as it is
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
    """For programs: settings, problems and notes."""
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
    """For people."""
    console = console or Console(highlight=False, width=_width())
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


def _width() -> int | None:
    """A file or a pipe has no edge to break words at: there the table is as wide as it reads well, unless told."""
    return None if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal() else WIDTH_IN_FILES


def _show_rows(report: Report, console: Console) -> None:
    """As a table where whole keys, values and sources leave room for the effect, else one below the other."""
    title = f"{escape(report.name)} at ZeRO stage {report.stage}"
    columns = zip(*((row.key, _shown(row.value), row.source) for row in report.rows))
    taken = sum(max(map(len, column)) for column in columns) + _BORDERS
    if taken + _LEAST_EFFECT <= console.width:
        console.print(_table(report, title))
        return
    console.print(title)
    for row in report.rows:
        # Never wrapped: a key that is broken cannot be searched for.
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
