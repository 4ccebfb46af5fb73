"""A DeepSpeed config file with Accelerate: the file has priority, and this script provides the rest.

    accelerate launch --use_hf_zero --deepspeed_config_file examples/config_support.json --num_processes 2 \\
        examples/config_support.py --checkpoints out/checkpoints
    torchrun --nproc-per-node 2 examples/config_support.py --config my_own.json

If the file has an "optimizer" section, DummyOptim takes the optimizer's place and provides its "auto" values; likewise
"scheduler" and DummyScheduler. Without these sections this script's own AdamW and schedule are used. A checkpoint is
written after every epoch; `--resume` resumes from the last one, also with a different number of processes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler, set_seed
from nlp_accelerate import accuracy
from topics import load_topics, new_model
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

DEFAULT = Path(__file__).with_suffix(".json")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(DEFAULT), help="DeepSpeed config file, without accelerate launch")
    parser.add_argument("--cpu", action="store_true", help="train on CPUs even if there are GPUs")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=32, help="samples per process and forward pass")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--limit", type=int, help="maximum number of samples per split, for a quick try")
    parser.add_argument("--checkpoints", type=Path, help="folder for a checkpoint after every epoch")
    parser.add_argument("--resume", action="store_true", help="resume from the newest checkpoint in that folder")
    parser.add_argument("--local_rank", type=int, default=-1, help="passed by some launchers, unused")
    return parser.parse_args(words)


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    """Uses the config file of `accelerate launch`, or else that of the command line."""
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    return Accelerator(cpu=args.cpu, deepspeed_plugin=None if launched else DeepSpeedPlugin(hf_ds_config=args.config))


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for weights, none for biases and norms, which have one dimension."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]


def make_optimizer(accelerator: Accelerator, model: torch.nn.Module, args: argparse.Namespace) -> Any:
    """Returns the script's optimizer, or a placeholder for the one in the config file."""
    groups = parameter_groups(model, args.weight_decay)
    if "optimizer" in accelerator.deepspeed_plugin.deepspeed_config:
        return DummyOptim(groups, lr=args.lr, weight_decay=args.weight_decay)
    return torch.optim.AdamW(groups, lr=args.lr)


def make_schedule(accelerator: Accelerator, optimizer: Any, steps: int) -> Any:
    """`steps` are those of one process, as Accelerate counts them before `prepare`."""
    if "scheduler" in accelerator.deepspeed_plugin.deepspeed_config:
        return DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=steps // 10)
    if isinstance(optimizer, DummyOptim):  # the engine creates the optimizer, and then asks for the schedule
        return DummyScheduler(optimizer, lr_scheduler_callable=lambda real: linear(real, steps))
    return linear(optimizer, steps)


def linear(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return get_linear_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)


def newest(checkpoints: Path | None) -> tuple[Path | None, int]:
    """The newest checkpoint's folder, and the number of finished epochs."""
    folders = {int(path.name.split("-")[1]): path for path in (checkpoints or Path()).glob("epoch-*")}
    return (folders[max(folders)], max(folders)) if folders else (None, 0)


def train(args: argparse.Namespace) -> float:
    """Returns the accuracy on held-out files."""
    accelerator = make_accelerator(args)
    set_seed(args.seed)
    trained_on, held_out = load_topics(args.limit)
    loader = DataLoader(trained_on, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(held_out, batch_size=4 * args.batch_size)
    model = new_model()
    optimizer = make_optimizer(accelerator, model, args)
    schedule = make_schedule(accelerator, optimizer, args.epochs * len(loader))
    model, optimizer, loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, loader, test_loader, schedule
    )
    folder, done = newest(args.checkpoints) if args.resume else (None, 0)
    if folder is not None:
        accelerator.load_state(str(folder))
        accelerator.print(f"goes on after epoch {done}", flush=True)
    for epoch in range(done + 1, args.epochs + 1):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
        if args.checkpoints:
            accelerator.save_state(str(args.checkpoints / f"epoch-{epoch}"))
    reached = accuracy(accelerator, model, test_loader)
    accelerator.print(f"accuracy {reached:.3f} on held-out files; guessing reaches {held_out.commonest():.3f}")
    accelerator.end_training()
    return reached


if __name__ == "__main__":
    train(arguments())
