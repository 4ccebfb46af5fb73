"""The command line, `hf-zero` or `python -m hf_zero`: launch, explain, plan, report, docs, zero_to_fp32, universal,
commands."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module

from hf_zero.quantities import parse_all

# Commands that parse their own arguments. (What follows the script of `launch` is the script's.)
_APART = {
    "docs": "hf_zero.pages",
    "launch": "hf_zero.launch.command_line",
    "zero_to_fp32": "hf_zero.zero_to_fp32",
    "universal": "hf_zero.ds_to_universal",
    "commands": "hf_zero.launch.restore",
}


def main(words: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = sys.argv[1:] if words is None else list(words)
    if words and words[0] in _APART:
        status: int = import_module(_APART[words[0]]).main(words[1:])
        return status
    parser = argparse.ArgumentParser(prog="hf-zero", description="ZeRO training for Hugging Face users.")
    commands = parser.add_subparsers(metavar="command", required=True)
    commands.add_parser("launch", help="start a script on all devices of this machine or of several")
    explain = commands.add_parser(
        "explain",
        help="show every key of a ds.json with its value, source and effect",
        allow_abbrev=False,
    )
    plan = commands.add_parser(
        "plan", help="what training a model needs, and the ds.json to take, before anything runs", allow_abbrev=False
    )
    report = commands.add_parser("report", aliases=["env"], help="versions, devices, links and features, for an issue")
    commands.add_parser("docs", help="a page of the documentation, or the list of them")
    commands.add_parser("zero_to_fp32", help="ordinary weights from a checkpoint")
    commands.add_parser("universal", help="a checkpoint in DeepSpeed's universal form")
    commands.add_parser("commands", help="the programs deepspeed and ds_report, which DeepSpeed's removal takes along")
    # Heavy modules are imported after the arguments are parsed, so that --help and errors appear immediately.
    if words[:1] in (["report"], ["env"]):
        from hf_zero.report.command import add_arguments as add_report_arguments
        from hf_zero.report.command import run as run_report

        add_report_arguments(report)
        return run_report(parse_all(report, words[1:]))
    if words[:1] == ["plan"]:
        from hf_zero.planning import collector_off
        from hf_zero.planning.arguments import MEANT, check_at_once
        from hf_zero.planning.arguments import add_arguments as add_plan_arguments

        add_plan_arguments(plan)
        arguments = parse_all(plan, words[1:], MEANT)
        check_at_once(plan, arguments)
        # Loading torch and transformers takes most of the time; standard output may be read as JSON.
        sys.stderr.write(f"planning {arguments.model} (loading transformers takes a few seconds)\n")
        with collector_off():
            from hf_zero.planning.command import run as run_plan

        gc.freeze()  # loaded modules never become garbage
        return run_plan(arguments)
    if words[:1] != ["explain"]:
        parser.parse_args(words)
    # Imported here because it loads transformers.
    from hf_zero.explain.command import add_arguments, run

    add_arguments(explain)
    known, more = parser.parse_known_args(words)
    return run(known, more)


def entry() -> None:
    """Run a command and exit. If torch is loaded, exit without the teardown of its modules, which takes up
    to a second."""
    try:
        status = main()
    except KeyboardInterrupt:
        sys.stderr.write("hf-zero: interrupted\n")
        status = 128 + signal.SIGINT
    if "torch" not in sys.modules or threading.active_count() > 1:
        sys.exit(status)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    entry()
