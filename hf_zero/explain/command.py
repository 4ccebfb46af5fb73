"""The command `explain`: its arguments, and the order in which things happen."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hf_zero.config import ConfigError, Findings, Problem, Views, examine, load_config
from hf_zero.config.extras import loaded
from hf_zero.explain.mend import default_target, mend, write_mended
from hf_zero.explain.report import Report, as_json, report_on, show
from hf_zero.explain.traffic import Links, Sent, number_of, traffic_rows
from hf_zero.explain.views import left_aside, model_view_by_name, training_view_from_flags
from hf_zero.integration.huggingface.views import launch_view

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
