"""`ds_report`: versions, devices and limits of this machine, made to be pasted into an issue."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hf_zero.integration.startup import NAME, is_ours

_LIBRARIES = ("transformers", "accelerate", "peft", "trl", "safetensors", "triton", "pydantic", "numpy")
_GIB = 1024**3


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Write the report to standard output. The arguments are DeepSpeed's: there are no operators to hide."""
    width = max(len(name) for name, _ in _rows())
    lines = [f"{name} {'.' * (width + 3 - len(name))} {value}" for name, value in _rows()]
    sys.stdout.write("\n".join(["hf_zero environment", *lines]) + "\n")


def cli_main(words: Sequence[str] | None = None) -> None:
    """The command `ds_report`, with DeepSpeed's flags."""
    parser = argparse.ArgumentParser(prog="ds_report", description="Versions and devices of this machine.")
    parser.add_argument("--hide_operator_status", action="store_true", help="no effect: there are no operators")
    parser.add_argument("--hide_errors_and_warnings", action="store_true", help="no effect: there are none to hide")
    options = parser.parse_args(words)
    main(options.hide_operator_status, options.hide_errors_and_warnings)


def _rows() -> Iterator[tuple[str, str]]:
    import torch

    from hf_zero.integration.compat.utils import version as answered

    yield "hf_zero", _version("hf-zero")
    loaded = sys.modules.get(NAME)
    yield "answers as deepspeed", answered if loaded is None or is_ours(loaded) else "no: a real deepspeed is loaded"
    yield "compiled operators", "none are needed: optimizers and offload run on PyTorch and Triton"
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    yield "torch", torch.__version__
    yield "torch cuda / hip", f"{torch.version.cuda} / {torch.version.hip}"
    for name in _LIBRARIES:
        yield name, _version(name)
    yield from _devices()
    yield "CPU cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    yield "shared memory", _shared_memory()


def _devices() -> Iterator[tuple[str, str]]:
    from hf_zero.integration.compat.accelerator import get_accelerator

    accelerator = get_accelerator()
    yield "device", f"{accelerator.device_name()}, {accelerator.communication_backend_name()} between ranks"
    if accelerator.device_name() == "cpu":
        yield "host memory", f"{accelerator.total_memory() / _GIB:.1f} GiB"
        return
    for index in range(accelerator.device_count()):
        memory = accelerator.total_memory(index) / _GIB
        yield f"device {index}", f"{_name_of(accelerator.device_name(), index)}, {memory:.1f} GiB"


def _name_of(kind: str, index: int) -> str:
    import torch

    return str(torch.get_device_module(kind).get_device_name(index))


def _shared_memory() -> str:
    if not Path("/dev/shm").is_dir():
        return "none (/dev/shm is missing)"
    usage = shutil.disk_usage("/dev/shm")
    return f"{usage.total / _GIB:.2f} GiB, {usage.free / _GIB:.2f} GiB free"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    cli_main()
