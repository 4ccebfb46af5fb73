"""Which nodes a job gets, from the hostfile, Slurm's allocation, or what this machine has."""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hf_zero.launch import LaunchError, shown
from hf_zero.launch.options import DEFAULT_HOSTFILE, NO_FILE_OF_ACCELERATE
from hf_zero.launch.world import (
    MAX_SLOTS,
    VISIBLE_DEVICES,
    Node,
    World,
    check_host,
    exclude,
    include,
    limit,
    read_hostfile,
)
from hf_zero.rank_environment import tasks_per_node

logger = logging.getLogger("hf_zero.launch")
LOCALHOST = "localhost"
_COUNT = "import torch; print(torch.accelerator.device_count())"


def listed_world(options: argparse.Namespace, environment: Mapping[str, str]) -> World | None:
    """The listed nodes, before any filter; None where there is only this machine.

    Raises:
        LaunchError: also for a hostfile that was asked for and is not there.
    """
    if options.hostfile not in (None, "", NO_FILE_OF_ACCELERATE):
        return read_hostfile(Path(options.hostfile))
    if options.hostfile != "" and Path(DEFAULT_HOSTFILE).is_file():
        return read_hostfile(Path(DEFAULT_HOSTFILE))
    if options.launcher == "slurm":
        return _allocation(options, environment)
    if options.hostfile == NO_FILE_OF_ACCELERATE:
        raise LaunchError("accelerate starts several machines and names no hostfile: give --deepspeed_hostfile FILE")
    return None


def chosen_world(options: argparse.Namespace, listed: World | None, environment: Mapping[str, str]) -> World:
    """The nodes and slots that take part."""
    world = _this_machine(options, environment) if listed is None else listed
    if options.include:
        return include(world, options.include)
    if options.exclude:
        return exclude(world, options.exclude)
    if listed is None and options.num_nodes > 1:
        raise LaunchError(f"--num_nodes {options.num_nodes} needs a hostfile that says which: --hostfile FILE")
    return limit(world, options.num_nodes, options.num_gpus)


def _this_machine(options: argparse.Namespace, environment: Mapping[str, str]) -> World:
    visible = environment.get(VISIBLE_DEVICES, "").strip()
    has_filter = bool(options.include or options.exclude or options.num_gpus > 0 or options.num_nodes > 1)
    if visible and not has_filter:
        # Indices or UUIDs: they are handed on as they are.
        devices = [device.strip() for device in visible.split(",") if device.strip() not in ("", "-1")]
        if devices:
            return World((Node(LOCALHOST, tuple(devices)),))
    if visible and has_filter:
        ignored = f"{VISIBLE_DEVICES}={visible}"
        logger.warning("%s is ignored: what the command line says about devices comes first", ignored)
    if options.num_gpus > 0:
        return World((Node(LOCALHOST, ("0",)),))  # as many as asked for, by the limit that follows
    return World((Node(LOCALHOST, tuple(str(index) for index in range(_count_devices()))),))


def _count_devices() -> int:
    """The number of GPUs according to torch, counted in a separate process; a machine without any has one rank."""
    try:
        environment = {name: value for name, value in os.environ.items() if name != VISIBLE_DEVICES}
        said = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, env=environment, check=True).stdout
        count = min(int(said.split()[-1]), MAX_SLOTS)
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError) as error:
        raise LaunchError(f"the devices of this machine cannot be counted ({error}): give --num_gpus") from None
    if count == 0:
        logger.info("no GPU on this machine: one rank on its CPU; --num_gpus N starts N of them")
    return max(1, count)


def _allocation(options: argparse.Namespace, environment: Mapping[str, str]) -> World:
    """The nodes of the Slurm allocation that this process runs in."""
    words = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not words:
        raise LaunchError(
            "--launcher slurm needs a hostfile, or an allocation to run in: start it from an sbatch script or salloc"
        )
    try:
        said = subprocess.run(["scontrol", "show", "hostnames", words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaunchError(f"scontrol does not say which hosts {shown(words)} are: {error}") from None
    names = said.stdout.split()
    for name in names:
        check_host(name, "scontrol show hostnames")
    slots = tuple(str(slot) for slot in range(_slots_per_node(options, environment)))
    return World(tuple(Node(name, slots) for name in names))


def _slots_per_node(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    if options.num_gpus > 0:
        return int(options.num_gpus)
    for name in ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_GPUS_ON_NODE"):
        counts = tasks_per_node(environment.get(name, ""))
        if len(set(counts)) > 1:
            raise LaunchError(f"{name}={environment[name]}: ask Slurm for as many tasks on every node")
        if counts and 1 <= counts[0] <= MAX_SLOTS and re.match(r"\d", environment[name]):
            return counts[0]
    return 1
