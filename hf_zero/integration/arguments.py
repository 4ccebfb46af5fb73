"""Command-line flags and environment names that DeepSpeed users expect to find."""

from __future__ import annotations

import argparse
import os

DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""File with environment variables that a launcher exports to remote machines."""


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`, with their old spellings, to a script's parser."""
    group = parser.add_argument_group("DeepSpeed", "hf_zero, under DeepSpeed's flags")
    for flag in ("--deepspeed", "--deepscale"):
        group.add_argument(flag, action="store_true", help=_help(flag, "train with ZeRO (read by the script itself)"))
    for flag in ("--deepspeed_config", "--deepscale_config"):
        group.add_argument(flag, type=str, default=None, help=_help(flag, "path of the ds.json file"))
    return parser


def _help(flag: str, text: str) -> str:
    return f"old spelling of {flag.replace('deepscale', 'deepspeed')}" if "deepscale" in flag else text
