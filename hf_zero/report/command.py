"""The command `python -m hf_zero report`, also `ds_report`: prints plain text for an issue, or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hf_zero.config import Aio

if TYPE_CHECKING:
    from hf_zero.report.environment import Feature, Row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--probe", metavar="FOLDER", action="append", default=[], help="also measure this drive")
    usual = Aio()
    parser.add_argument("--block-size", type=int, default=usual.block_size, help="for --probe: bytes per request")
    parser.add_argument("--queue-depth", type=int, default=usual.queue_depth, help="for --probe: requests at once")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Write the report; returns 1 if a drive could not be probed."""
    from hf_zero.offload.vector import StorageError
    from hf_zero.report import environment  # loads torch, which arguments do not need

    parts = {
        "hf_zero environment": environment.software(),
        "devices": environment.devices(),
        "host": environment.host(),
        "links": environment.networks(),
        "variables": environment.variables(),
    }
    sections = {title: list(rows) for title, rows in parts.items()}
    policy, failed = Aio(block_size=arguments.block_size, queue_depth=arguments.queue_depth), False
    for folder in arguments.probe:
        try:
            speed = str(environment.probe(folder, policy))
        except StorageError as error:
            speed, failed = f"FAILED: {error}", True
        sections.setdefault("drives", []).append((folder, speed))
    matrix, here = environment.between_devices(), list(environment.features())
    if arguments.json:
        shown: dict[str, Any] = {title: dict(rows) for title, rows in sections.items()}
        shown |= {"between devices": matrix, "features": [dataclasses.asdict(each) for each in here]}
        sys.stdout.write(json.dumps(shown, indent=2) + "\n")
    else:
        sys.stdout.write(_text(sections, matrix, here))
    return 1 if failed else 0


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report. The arguments are DeepSpeed's and have no effect: there are no operators to hide."""
    run(_parser("ds_report").parse_args([]))


def cli_main(words: Sequence[str] | None = None) -> None:
    """The command `ds_report`, with DeepSpeed's flags and ours."""
    parser = _parser("ds_report")
    parser.add_argument("--hide_operator_status", action="store_true", help="no effect: there are no operators")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="no effect: there are none to hide")
    sys.exit(run(parser.parse_args(words)))


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Print versions, devices, links, limits and features.")
    add_arguments(parser)
    return parser


def _text(sections: dict[str, list[Row]], matrix: str, here: Sequence[Feature]) -> str:
    width = max(len(name) for rows in sections.values() for name, _ in rows)
    lines: list[str] = []
    for title, rows in sections.items():
        if rows:
            lines += [title, *(f"{name} {'.' * (width + 3 - len(name))} {value}" for name, value in rows), ""]
    if matrix:
        lines += ["between devices", matrix, ""]
    lines.append("features")
    for feature in here:
        note = f": {feature.note}" if feature.note else ""
        lines.append(f"[{'yes' if feature.is_available else 'NO':>3}] {feature.name}{note}")
    return "\n".join(lines) + "\n"
