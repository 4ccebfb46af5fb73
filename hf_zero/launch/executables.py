"""The launcher under DeepSpeed's names: `deepspeed.launcher.runner`, and the commands `deepspeed` and `ds_report`."""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from hf_zero.integration.startup import FINDER
from hf_zero.launch.command_line import DEFAULT_HOSTFILE, parse
from hf_zero.launch.command_line import main as launch
from hf_zero.launch.job import PREFIXES
from hf_zero.launch.world import Node, World, exclude, include, read_hostfile

DLTS_HOSTFILE = DEFAULT_HOSTFILE
EXPORT_ENVS = PREFIXES
"""Prefixes of environment variables that are passed to other machines; programs append to it."""


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the launcher's command line, with the script in `user_script`."""
    return parse(sys.argv[1:] if args is None else args)


def main(args: Sequence[str] | None = None) -> None:
    """Start the ranks; exit with their exit status unless it is 0."""
    status = launch(sys.argv[1:] if args is None else list(args))
    if status:
        sys.exit(status)


def fetch_hostfile(hostfile_path: str | os.PathLike[str]) -> OrderedDict[str, int] | None:
    """A mapping of host to number of slots in file order; None if the file does not exist.

    Raises:
        LaunchError: a ValueError that names file, line and rule.
    """
    if not Path(hostfile_path).is_file():
        return None
    world = read_hostfile(Path(hostfile_path))
    return OrderedDict((node.name, len(node.slots)) for node in world.nodes)


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> OrderedDict[str, list[int]]:
    """A mapping of host to the slots that --include and --exclude select."""
    return parse_resource_filter(
        {host: list(range(slots)) for host, slots in resource_pool.items()}, inclusion, exclusion
    )


def parse_resource_filter(
    host_info: Mapping[str, Sequence[int]], include_str: str = "", exclude_str: str = ""
) -> OrderedDict[str, list[int]]:
    """Like `parse_inclusion_exclusion`, for hosts with lists of slots.

    Raises:
        ValueError: if both filters are given, or a filter names an unknown host or slot.
    """
    if include_str and exclude_str:
        raise ValueError("include_str and exclude_str are mutually exclusive: give the shorter one")
    world = World(tuple(Node(host, tuple(map(str, slots))) for host, slots in host_info.items()))
    if include_str:
        world = include(world, include_str)
    elif exclude_str:
        world = exclude(world, exclude_str)
    return OrderedDict((node.name, [int(slot) for slot in node.slots]) for node in world.nodes)


def encode_world_info(world_info: Mapping[str, Any]) -> str:
    """The JSON text as URL-safe base64, the form in which launchers pass it on."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def deepspeed() -> None:
    """Start ranks with DeepSpeed's launcher if DeepSpeed is installed, else with ours, which has the same options."""
    home = __name__ if FINDER.answers() else "deepspeed.launcher.runner"
    import_module(home).main()


def ds_report() -> None:
    """Print versions, devices and limits for a bug report, with DeepSpeed's command if DeepSpeed is installed."""
    home = "hf_zero.report.command" if FINDER.answers() else "deepspeed.env_report"
    import_module(home).cli_main()
