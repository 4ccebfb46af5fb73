"""The command line: `python -m hf_zero explain ds.json`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hf_zero.explain.command import add_arguments, run


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m hf_zero", description="ZeRO training for Hugging Face users.")
    commands = parser.add_subparsers(metavar="command", required=True)
    explain = commands.add_parser(
        "explain",
        help="what a ds.json means: every key with its value, where that came from, and what it does",
        allow_abbrev=False,
    )
    add_arguments(explain)
    known, more = parser.parse_known_args(words)
    return run(known, more)


if __name__ == "__main__":
    sys.exit(main())
