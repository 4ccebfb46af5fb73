"""The command line, `hf-zero` or `python -m hf_zero`: `explain ds.json`, `plan MODEL`, `launch script.py`, `report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    words = sys.argv[1:] if words is None else list(words)
    if words[:1] == ["launch"]:
        # What follows the script belongs to the script, whatever it looks like: no other parser may see it.
        from hf_zero.launch.command_line import main as launch

        return launch(words[1:])
    parser = argparse.ArgumentParser(prog="hf-zero", description="ZeRO training for Hugging Face users.")
    commands = parser.add_subparsers(metavar="command", required=True)
    commands.add_parser("launch", help="start a script on all devices of this machine or of several")
    explain = commands.add_parser(
        "explain",
        help="what a ds.json means: every key with its value, where that came from, and what it does",
        allow_abbrev=False,
    )
    plan = commands.add_parser(
        "plan", help="what training a model needs, and the ds.json to take, before anything runs", allow_abbrev=False
    )
    report = commands.add_parser("report", help="versions, devices, links and features here, for an issue")
    if words[:1] == ["report"]:
        from hf_zero.report.command import add_arguments as add_report_arguments
        from hf_zero.report.command import run as run_report

        add_report_arguments(report)
        return run_report(parser.parse_args(words))
    if words[:1] == ["plan"]:
        from hf_zero.planning import collector_off

        with collector_off():
            from hf_zero.planning.command import add_arguments as add_plan_arguments
            from hf_zero.planning.command import run as run_plan

        add_plan_arguments(plan)
        return run_plan(parser.parse_args(words))
    if words[:1] != ["explain"]:
        parser.parse_args(words)
    # Not before it is wanted: it loads transformers.
    from hf_zero.explain.command import add_arguments, run

    add_arguments(explain)
    known, more = parser.parse_known_args(words)
    return run(known, more)


if __name__ == "__main__":
    sys.exit(main())
