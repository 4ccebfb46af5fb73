"""The arguments of `plan`. This module does not import torch, so that `--help` and wrong flags answer at once."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
from dataclasses import dataclass

# The GPUs that plans know, by name.


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in bytes, and achieved speeds: 16-bit FLOP/s (about 0.6 of the data sheet) and bytes/s (about 0.9)."""

    capacity: float
    flops: float
    memory: float
    link: float  # to other GPUs of the host
    host_link: float
    host_memory: float = 64e9  # per GPU, of hosts that are typically sold or rented with it
    # Maximum speed of host memory per GPU: a quarter of a server with two sockets (16 cores of one updated at 91 to 109
    # GB/s), or a desktop with two channels.
    host_speed: float = 108e9
    fp32: float = 1 / 16  # fraction of `flops` in fp32 (torch only uses TF32 if enabled)


# All words of a key must be words of the driver's name: "NVIDIA A100-SXM4-40GB" is an a100-40, but h1000 is no h100.
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
    # These have two dies, each of which is a device.
    "mi250": Gpu(64e9, 109e12, 1.44e12, 100e9, 25e9, 128e9, fp32=1 / 8),
    "mi250x": Gpu(64e9, 115e12, 1.44e12, 100e9, 25e9, 128e9, fp32=1 / 8),
    "mi300x": Gpu(192e9, 650e12, 4.8e12, 300e9, 55e9, 256e9, fp32=1 / 8),
    "mi325x": Gpu(256e9, 650e12, 5.4e12, 300e9, 55e9, 256e9, fp32=1 / 8),
    "mi355x": Gpu(288e9, 1150e12, 7.2e12, 380e9, 55e9, 256e9),
}


def known_gpu(name: str) -> Gpu | None:
    """Return the GPU for a name from the driver or the user, or None."""
    words = words_of(name)
    known = [key for key in GPUS if words_of(key) <= words]
    return GPUS[max(known, key=len)] if known else None


def words_of(name: str) -> set[str]:
    return {word.removesuffix("gb") for word in re.split(r"[^a-z0-9]+", name.lower()) if word}


# Names of these flags in other programs.
MEANT = {
    "--batch": "--micro-batch",
    "--batch-size": "--micro-batch",
    "--per-device-train-batch-size": "--micro-batch",
    "--train-batch-size": "--global-batch",
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
    "--bits": "--base-bits",
    "--output": "--write",
}
_SIZES = "in bytes: 80G, 1.5T, 24GiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder, config.json, hub name, or a number of parameters (7b, 350M, 1.5e9)")
    machine = parser.add_argument_group("machine (default: this one)")
    machine.add_argument("--gpu", metavar="NAME", help=f"{', '.join(GPUS)} or cpu; any name with --device-memory")
    machine.add_argument("--gpus-per-node", type=int, metavar="N", help="devices per host (on CPUs: ranks)")
    machine.add_argument("--nodes", type=int, metavar="N", help="hosts (default: 1)")
    machine.add_argument("--device-memory", metavar="SIZE", help=f"memory of one device, {_SIZES}")
    machine.add_argument("--host-memory", metavar="SIZE", help="memory of one host")
    machine.add_argument("--disk", metavar="SIZE", help="drive of one host (default: free space of --nvme-path)")
    machine.add_argument("--nvme-path", metavar="DIR", help="folder for NVMe offload (default: no NVMe offload)")
    machine.add_argument("--link", metavar="SIZE", help="bytes per second between devices of a host, one direction")
    machine.add_argument("--calibrate", action="store_true", help="first measure this machine's speeds (one second)")
    machine.add_argument("--network", metavar="SIZE", help="bytes per second to other hosts, per device")
    training = parser.add_argument_group("training")
    training.add_argument("--seq-length", type=int, default=2048, metavar="N", help="tokens per sample (2048)")
    training.add_argument("--micro-batch", type=int, metavar="N", help="samples per forward (default: searched)")
    training.add_argument("--accumulation", type=int, metavar="N", help="forwards per update (1)")
    training.add_argument(
        "--global-batch", type=int, metavar="N", help="samples per update of all ranks, from which accumulation follows"
    )
    training.add_argument("--precision", choices=["bf16", "fp16", "fp32"], default="bf16")
    training.add_argument(
        "--gradient-checkpointing", choices=["auto", "on", "off"], default="auto", help="auto: the better of the two"
    )
    training.add_argument("--lora-rank", type=int, default=0, metavar="R", help="LoRA on all linear layers (none)")
    training.add_argument(
        "--base-bits", type=int, choices=[4, 8], default=0, help="with --lora-rank: a base in 4 bit (QLoRA) or 8 bit"
    )
    training.add_argument(
        "--double-quant", action="store_true", help="with --base-bits 4: scales in 8 bit (bnb_4bit_use_double_quant)"
    )
    training.add_argument("--optimizer", default="AdamW", metavar="TYPE", help="optimizer.type of ds.json (AdamW)")
    training.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share each matrix (1)"
    )
    training.add_argument(
        *("--sequence-parallel", "--sequence-ranks"),
        type=int,
        metavar="N",
        help="ranks that share each sequence (1; with --longest as many ranks of a host as heads allow)",
    )
    training.add_argument(
        "--expert-parallel", type=int, default=1, metavar="N", help="ranks that experts are distributed over (1)"
    )
    training.add_argument(
        "--config", metavar="DS.JSON", help="your ds.json: it overrides these options and gets its own row"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--measure", type=int, default=0, metavar="N", help="run the N most promising for a few steps")
    output.add_argument("--measure-dir", default="plan_results", metavar="DIR", help="for their files (plan_results)")
    output.add_argument(
        "--longest", action="store_true", help="only show the longest sequence that fits, with tiled MLPs and loss"
    )
    output.add_argument("--json", action="store_true", help="JSON instead of a table")
    output.add_argument("--html", metavar="FILE", help="also write an HTML page with bar charts")
    output.add_argument("--write", metavar="FILE", help="also write the chosen ds.json")
    output.add_argument("--all", action="store_true", help="also show candidates that do not fit")


def check_at_once(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with an error for arguments that are wrong, before torch is imported."""
    name = arguments.gpu
    if name is not None and name != "cpu" and known_gpu(name) is None and arguments.device_memory is None:
        parser.error(f"--gpu {name}: {unknown_gpu(name)}")
    if arguments.lora_rank > 0 and importlib.util.find_spec("peft") is None:
        parser.error("--lora-rank: LoRA needs peft, which is not installed. Run pip install peft")
    if arguments.base_bits and not arguments.lora_rank:
        parser.error("--base-bits: only a base that is not trained is quantized. Give --lora-rank R, too")
    if arguments.double_quant and arguments.base_bits != 4:
        parser.error("--double-quant: only a base in 4 bit has such scales. Give --base-bits 4, too, or leave it out")
    if arguments.base_bits and arguments.measure:
        parser.error("--base-bits: --measure runs models with random weights, which are not quantized. Leave out one")


def unknown_gpu(name: str) -> str:
    """Return the error for a GPU that is not in the list, and the fix."""
    close = difflib.get_close_matches(name, GPUS, n=1)
    guess = f"Did you mean {close[0]}? " if close else ""
    known = ", ".join(GPUS)
    return f"its speed and memory are not known. {guess}Give one of {known}, cpu, or also give --device-memory"
