"""The arguments of `plan`, without torch: `--help` and a wrong flag answer at once."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
from dataclasses import dataclass

# The GPUs that plans know, by name.


@dataclass(frozen=True, slots=True)
class Gpu:
    """Bytes and what is reached per second, of FLOPs in 16 bits and of bytes: about 0.6 and 0.9 of the data sheet."""

    capacity: float
    flops: float
    memory: float
    link: float  # to others in the host
    host_link: float
    host_memory: float = 64e9  # of the hosts that are sold or rented with it, for each GPU
    # Of that memory, for each GPU at most: a quarter of a server with two sockets (16 cores of one updated at 91 to 109
    # GB/s), or a desktop with two channels.
    host_speed: float = 108e9
    fp32: float = 1 / 16  # share of `flops` that products in fp32 reach (torch uses TF32 only where it is told to)


# All words of a name must be words of the driver's name: "NVIDIA A100-SXM4-40GB" is an a100-40, an h1000 is no h100.
GPUS = {
    "b300": Gpu(288e9, 1350e12, 7.2e12, 740e9, 55e9, 256e9),
    "b200": Gpu(180e9, 1350e12, 7.2e12, 740e9, 55e9, 256e9),
    "gh200": Gpu(96e9, 590e12, 3.6e12, 370e9, 400e9, 480e9, host_speed=350e9),
    "h200": Gpu(141e9, 590e12, 4.3e12, 370e9, 55e9, 256e9),
    "h100": Gpu(80e9, 590e12, 3.0e12, 370e9, 55e9, 256e9),
    "h100-pcie": Gpu(80e9, 450e12, 1.8e12, 40e9, 55e9, 256e9),
    "h800": Gpu(80e9, 590e12, 3.0e12, 165e9, 55e9, 256e9),
    "h20": Gpu(96e9, 89e12, 3.6e12, 370e9, 55e9, 256e9, fp32=1 / 4),
    "a100": Gpu(80e9, 187e12, 1.8e12, 250e9, 25e9, 128e9),
    "a100-40": Gpu(40e9, 187e12, 1.4e12, 250e9, 25e9, 128e9),
    "a800": Gpu(80e9, 187e12, 1.8e12, 165e9, 25e9, 128e9),
    "l40s": Gpu(48e9, 217e12, 0.78e12, 22e9, 25e9, 128e9, fp32=1 / 2),
    "l20": Gpu(48e9, 72e12, 0.78e12, 22e9, 25e9, 128e9, fp32=1 / 2),
    "l4": Gpu(24e9, 73e12, 0.27e12, 22e9, 25e9, fp32=1 / 4),
    "a10": Gpu(24e9, 75e12, 0.54e12, 22e9, 25e9, fp32=1 / 4),
    "a10g": Gpu(24e9, 42e12, 0.54e12, 22e9, 25e9, fp32=1 / 4),
    "a6000": Gpu(48e9, 93e12, 0.69e12, 22e9, 25e9, fp32=1 / 2),
    "5090": Gpu(32e9, 126e12, 1.61e12, 40e9, 50e9, host_speed=60e9, fp32=1 / 2),
    "4090": Gpu(24e9, 124e12, 0.9e12, 20e9, 25e9, host_speed=60e9, fp32=1 / 2),
    "3090": Gpu(24e9, 53e12, 0.84e12, 20e9, 25e9, host_speed=60e9, fp32=1 / 2),
    "v100": Gpu(32e9, 75e12, 0.81e12, 120e9, 12e9, fp32=1 / 8),
    "t4": Gpu(16e9, 32e12, 0.29e12, 10e9, 12e9, fp32=1 / 8),
    # One of the two dies of these, each a device of its own.
    "mi250": Gpu(64e9, 109e12, 1.44e12, 100e9, 25e9, 128e9, fp32=1 / 8),
    "mi250x": Gpu(64e9, 115e12, 1.44e12, 100e9, 25e9, 128e9, fp32=1 / 8),
    "mi300x": Gpu(192e9, 650e12, 4.8e12, 300e9, 55e9, 256e9, fp32=1 / 8),
    "mi325x": Gpu(256e9, 650e12, 5.4e12, 300e9, 55e9, 256e9, fp32=1 / 8),
    "mi355x": Gpu(288e9, 1150e12, 7.2e12, 380e9, 55e9, 256e9),
}


def known_gpu(name: str) -> Gpu | None:
    """The one that a driver's or a user's `name` means."""
    words = words_of(name)
    known = [key for key in GPUS if words_of(key) <= words]
    return GPUS[max(known, key=len)] if known else None


def words_of(name: str) -> set[str]:
    return {word.removesuffix("gb") for word in re.split(r"[^a-z0-9]+", name.lower()) if word}


# What other programs call it.
MEANT = {
    "--batch": "--micro-batch",
    "--batch-size": "--micro-batch",
    "--per-device-train-batch-size": "--micro-batch",
    "--gradient-accumulation-steps": "--accumulation",
    "--context": "--seq-length",
    "--context-length": "--seq-length",
    "--max-length": "--seq-length",
    "--max-seq-length": "--seq-length",
    "--gpus": "--gpus-per-node",
    "--num-gpus": "--gpus-per-node",
    "--num-nodes": "--nodes",
    "--memory": "--device-memory",
    "--mem": "--device-memory",
    "--ram": "--host-memory",
    "--nvme": "--nvme-path",
    "--dtype": "--precision",
    "--tp": "--tensor-parallel",
    "--sp": "--sequence-parallel",
    "--ep": "--expert-parallel",
    "--lora": "--lora-rank",
    "--output": "--write",
}
_SIZES = "a number of bytes: 80G, 1.5T, 24GiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `plan` takes."""
    parser.add_argument("model", help="folder, config.json, hub name, or a number of parameters (7b, 350M, 1.5e9)")
    machine = parser.add_argument_group("the machine (what is not said is found on this one)")
    machine.add_argument("--gpu", metavar="NAME", help=f"one of {', '.join(GPUS)}, cpu; or any, with --device-memory")
    machine.add_argument("--gpus-per-node", type=int, metavar="N", help="devices (on a CPU, ranks) of one host")
    machine.add_argument("--nodes", type=int, metavar="N", help="hosts (default: 1)")
    machine.add_argument("--device-memory", metavar="SIZE", help=f"of one device, {_SIZES}")
    machine.add_argument("--host-memory", metavar="SIZE", help="of one host")
    machine.add_argument("--disk", metavar="SIZE", help="of one host, with --nvme-path; found where the path is here")
    machine.add_argument("--nvme-path", metavar="DIR", help="where states may go: without it no drive is used")
    machine.add_argument("--link", metavar="SIZE", help="bytes per second between the devices of a host, one direction")
    machine.add_argument("--calibrate", action="store_true", help="measure this machine's speeds first, in a second")
    machine.add_argument("--network", metavar="SIZE", help="bytes per second to other hosts, for one device")
    training = parser.add_argument_group("the training")
    training.add_argument("--seq-length", type=int, default=2048, metavar="N", help="tokens of a sample (2048)")
    training.add_argument("--micro-batch", type=int, default=1, metavar="N", help="samples of a forward (1)")
    training.add_argument("--accumulation", type=int, default=1, metavar="N", help="forwards of an update (1)")
    training.add_argument("--precision", choices=["bf16", "fp16", "fp32"], default="bf16")
    training.add_argument(
        "--gradient-checkpointing", choices=["auto", "on", "off"], default="auto", help="auto: both, and the better one"
    )
    training.add_argument("--lora-rank", type=int, default=0, metavar="R", help="adapters on all linear layers (none)")
    training.add_argument("--optimizer", default="AdamW", metavar="TYPE", help="optimizer.type of ds.json (AdamW)")
    training.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="ranks that hold parts of the same matrices (1)"
    )
    training.add_argument(
        *("--sequence-parallel", "--sequence-ranks"),
        type=int,
        metavar="N",
        help="ranks that hold parts of the same sequences (1; of --longest a host's, as heads divide)",
    )
    training.add_argument(
        "--expert-parallel", type=int, default=1, metavar="N", help="ranks that hold all experts between them (1)"
    )
    training.add_argument(
        "--config", metavar="DS.JSON", help="yours: what it says goes before the above, and it gets a row of its own"
    )
    output = parser.add_argument_group("what comes out")
    output.add_argument("--measure", type=int, default=0, metavar="N", help="run the N most promising for a few steps")
    output.add_argument("--measure-dir", default="plan_results", metavar="DIR", help="for their files (plan_results)")
    output.add_argument(
        "--longest", action="store_true", help="instead: the longest sequence that fits, with MLPs and loss in tiles"
    )
    output.add_argument("--json", action="store_true", help="JSON instead of a table")
    output.add_argument("--html", metavar="FILE", help="also a page of its own, with bars")
    output.add_argument("--write", metavar="FILE", help="also the chosen ds.json")
    output.add_argument("--all", action="store_true", help="also what does not fit")


def check_at_once(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program for what can be seen to be wrong before anything heavy is loaded."""
    name = arguments.gpu
    if name is not None and name != "cpu" and known_gpu(name) is None and arguments.device_memory is None:
        parser.error(f"--gpu {name}: {unknown_gpu(name)}")
    if arguments.lora_rank > 0 and importlib.util.find_spec("peft") is None:
        parser.error("--lora-rank: adapters are made by peft, which is not installed. Run pip install peft")


def unknown_gpu(name: str) -> str:
    """What to say of a GPU that is not in the list, and what to do."""
    close = difflib.get_close_matches(name, GPUS, n=1)
    guess = f"Did you mean {close[0]}? " if close else ""
    known = ", ".join(GPUS)
    return f"its speed and memory are not known. {guess}Give one of {known}, cpu, or --device-memory as well"
