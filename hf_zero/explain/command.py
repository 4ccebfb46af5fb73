"""The command `explain`: its arguments, and the order in which things happen.

`mend` is `explain --fix`: the config with every problem fixed that its author need not decide.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_zero.config import ConfigDict, ConfigError, Findings, Problem, Views, examine, load_config
from hf_zero.config.errors import ABSENT, Edit, Remark
from hf_zero.config.extras import loaded
from hf_zero.explain.report import Report, as_json, report_on, show
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

_ROUNDS = 5  # a key that was renamed may be wrong under its right name, too


def mend(config: ConfigDict, views: Views, *, ranks_known: bool = True) -> tuple[dict[str, Any], list[str]]:
    """A mended copy of the config as plain dicts, and a line for every change.

    Args:
        ranks_known: False: the number of ranks has not been given, so that batch sizes which do not go
            together here may be right there.
    """
    mended: dict[str, Any] = copy.deepcopy(dict(config))
    changes: list[str] = []
    for _ in range(_ROUNDS):
        edits = [
            edit
            for edit in _edits(examine(mended, views, complete=False))
            if ranks_known or edit.path != ("train_batch_size",) or edit.to
        ]
        done = [str(edit) for edit in edits if _apply(mended, edit)]
        changes += done
        if not done:
            break
    return mended, changes


def _edits(findings: Findings) -> Iterator[Edit]:
    """Once per place: a key that is wrong for two reasons is changed for the first. What changes nothing may stay."""
    seen = set()
    found: list[Problem | Remark] = [*findings.problems, *findings.remarks]
    for finding in found:
        edit = finding.edit
        if edit is None or edit.path in seen:
            continue
        if not isinstance(finding, Remark) or finding.ignored or edit.to or edit.value is not ABSENT:
            seen.add(edit.path)
            yield edit


def _apply(config: dict[str, Any], edit: Edit) -> bool:
    """Carry out an edit; False where its place is not there or the new one is taken."""
    holder = _holder(config, edit.path)
    if holder is None or edit.path[-1] not in holder:
        return False
    if not edit.to:
        if edit.value is ABSENT:
            del holder[edit.path[-1]]
        else:
            holder[edit.path[-1]] = edit.value
        return True
    target = _holder(config, edit.to, make=True)
    if target is None or target.get(edit.to[-1]) is not None:
        return False
    written = holder.pop(edit.path[-1])
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
    """The file; an existing one is never overwritten.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=4) + "\n")
    except FileExistsError:
        raise ConfigError(Problem("--fix", str(target), "there is such a file", "name another, or remove it")) from None
    except OSError as error:
        rule = f"it cannot be written: {error.strerror}"
        raise ConfigError(Problem("--fix", str(target), rule, "name another")) from None


def default_target(name: str) -> Path:
    """ds.json -> ds.fixed.json beside it; a config that came as text goes to the working directory."""
    path = Path(name or "ds.json")
    return path.with_name(f"{path.stem}.fixed.json")


_OWN_FLAGS = (
    "--model", "--world-size", "--gpus-per-node", "--parameters", "--link", "--network", "--json", "--all", "--fix",
    "--fix-to",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `explain` itself takes; everything else is taken for flags of TrainingArguments."""
    parser.add_argument("config", help="ds.json: a path, JSON text, or base64 of it")
    parser.add_argument("--model", help="folder, config.json or hub name of the model, for sizes that follow from it")
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks (default: 1)")
    traffic = parser.add_argument_group("what is sent per update")
    traffic.add_argument("--gpus-per-node", type=int, metavar="N", help="ranks of one host (default: all)")
    traffic.add_argument("--parameters", metavar="COUNT", help="of the model, as 7b: bytes and seconds, not models")
    traffic.add_argument("--link", metavar="SIZE", help="bytes per second between ranks of a host (370G)")
    traffic.add_argument("--network", metavar="SIZE", help="bytes per second to other hosts, for one rank (40G)")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    parser.add_argument("--all", action="store_true", help="also keys that have no effect at this stage")
    parser.add_argument(
        "--fix", "--fix-to", nargs="?", const="", metavar="FILE",
        help="write a mended copy into FILE (default: ds.fixed.json beside ds.json); none is overwritten",
    )  # fmt: skip
    parser.usage = (
        "%(prog)s ds.json [TrainingArguments flags...] [--model M] [--world-size N] [--json] [--all] [--fix [FILE]]"
    )


def run(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Print the report; 1 if anything is wrong."""
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
        training, unused = training_view_from_flags(flags, also=_OWN_FLAGS)
        notes += map(left_aside, unused)
        model = model_view_by_name(arguments.model)
        world_size = 1 if arguments.world_size is None else arguments.world_size
        views = Views(world_size=world_size, training=training, accelerator=launch_view(os.environ), model=model)
        name = config.name or "the config given"
        if arguments.fix is not None:
            mended, changes = mend(config, views, ranks_known=arguments.world_size is not None)
            target = Path(arguments.fix) if arguments.fix else default_target(config.name)
            write_mended(mended, target)
            notes += [f"--fix: {change}" for change in changes or ["nothing to mend"]]
            notes.append(f"the mended config is in {target}; comments are not carried over")
            config, name = load_config(target), str(target)
        findings = examine(config, views, complete=False)
        if arguments.world_size is None and any(problem.path == "train_batch_size" for problem in findings.problems):
            notes.append("train_batch_size was looked at for 1 rank: --world-size N says for how many it is meant")
        traffic = _traffic(findings, arguments)
        for explained in _by_extras(findings):
            words, wrong = explained(findings, arguments.model)
            notes += words
            findings = dataclasses.replace(findings, problems=(*findings.problems, *wrong))
    except ConfigError as error:
        problems += error.problems
        return Report(name=str(arguments.config)[:200], problems=tuple(problems), notes=tuple(notes))
    return report_on(findings, name=name, extra_notes=notes, everything=arguments.all, traffic=traffic)


def _by_extras(findings: Findings) -> Iterator[Any]:
    """What the extras of a config without problems have to say beside it: functions of findings and --model."""
    for extra in findings.config.features if not findings.problems else ():
        if "explain" in extra.services and extra.name in findings.extras:
            yield loaded(extra.services["explain"])


def _traffic(findings: Findings, arguments: argparse.Namespace) -> tuple[Sent, ...]:
    links, parameters = Links(), None
    if arguments.link is not None:
        links = dataclasses.replace(links, within=number_of(arguments.link, "--link"))
    if arguments.network is not None:
        links = dataclasses.replace(links, across=number_of(arguments.network, "--network"))
    if arguments.parameters is not None:
        parameters = number_of(arguments.parameters, "--parameters")
    return traffic_rows(findings, arguments.gpus_per_node, parameters, links)
