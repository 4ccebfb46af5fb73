"""One of OpenRLHF's training commands on CPUs, with hf_zero's engine or, for comparison, with plain PyTorch.

    torchrun --nproc_per_node 2 openrlhf_script.py ENGINE COMMAND ARGUMENTS...

ENGINE is `deepspeed` (whatever `import deepspeed` finds) or `plain`, COMMAND a module such as openrlhf.cli.train_sft.
The commands' uses of a GPU are replaced: the device, its name in the mesh, and the functions of flash-attn that are
imported but, without packed samples, never called. The commands train in 16 bits only; here in fp32, so that results
are comparable. Their values for TensorBoard are written to scalars.jsonl.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def stand_in_for_a_gpu() -> None:
    """Uses the CPU as the current device, dummies for flash-attn's helpers, and a writer of scalars."""
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    names = {
        "flash_attn": (),
        "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
        "flash_attn.utils": (),
        "flash_attn.utils.distributed": ("all_gather",),
    }
    for module, functions in names.items():
        sys.modules[module] = module_from_spec(ModuleSpec(module, None))
        for function in functions:
            setattr(sys.modules[module], function, None)
    sys.modules["torch.utils.tensorboard"] = ModuleType("torch.utils.tensorboard")
    sys.modules["torch.utils.tensorboard"].SummaryWriter = Scalars  # type: ignore[attr-defined]


class Scalars:
    """A SummaryWriter that writes lines of JSON."""

    def __init__(self, log_dir: str) -> None:
        Path(log_dir).mkdir(parents=True)
        self.file = Path(log_dir, "scalars.jsonl").open("w")

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.file.write(json.dumps({"name": name, "step": step, "value": value}) + "\n")

    def close(self) -> None:
        self.file.close()


def change_openrlhf() -> None:
    """A mesh of CPUs, and fp32 where its flags offer 16-bit types."""
    import openrlhf.utils.config as config
    import openrlhf.utils.deepspeed.deepspeed as strategy
    import openrlhf.utils.utils as utils

    make_mesh, read_arguments = strategy.init_device_mesh, config.hierarchize

    def in_fp32(flat: Any) -> Any:
        arguments = read_arguments(flat)
        arguments.ds.param_dtype = "fp32"
        return arguments

    strategy.init_device_mesh = lambda device, *rest, **more: make_mesh("cpu", *rest, **more)
    config.hierarchize = in_fp32
    utils.convert_to_torch_dtype = lambda name: getattr(torch, {"fp32": "float32"}[name])


class Plain(nn.Module):
    """The engine API that OpenRLHF uses, in PyTorch: DDP, AdamW, accumulation, clipping, a schedule."""

    def __init__(self, module: nn.Module, groups: list[Any], config: dict[str, Any], schedule: Callable[..., Any]):
        super().__init__()
        self.module = module
        self.parallel = [DistributedDataParallel(module)]  # in a list, so that its parameters get no second name
        self.accumulation = config["train_batch_size"] // config["train_micro_batch_size_per_gpu"]
        self.accumulation //= int(os.environ["WORLD_SIZE"])
        self.max_norm = config["gradient_clipping"]
        self.optimizer = torch.optim.AdamW(groups, **config["optimizer"]["params"])
        self.scheduler = schedule(self.optimizer)
        self.micro_steps = self.global_steps = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.parallel[0](*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulation).backward()

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.accumulation:
            return
        nn.utils.clip_grad_norm_(self.module.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.global_steps += 1


def initialize(model: nn.Module, config: dict[str, Any], **given: Any) -> tuple[Any, ...]:
    """Replaces `deepspeed.initialize`. A model without an optimizer is for forward passes only."""
    if "optimizer" not in config:
        return model, None, None, None
    engine = Plain(model, given["model_parameters"], config, given["lr_scheduler"])
    return engine, engine.optimizer, None, engine.scheduler


def main() -> None:
    engine, command, *sys.argv[1:] = sys.argv[1:]
    stand_in_for_a_gpu()
    change_openrlhf()
    if engine == "plain":
        import deepspeed

        deepspeed.initialize = initialize
    runpy.run_module(command, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
