"""Text classification by topic: a training loop that uses only Accelerate's API.

    accelerate launch --use_hf_zero --zero_stage 2 --num_processes 2 examples/nlp_accelerate.py
    torchrun --nproc-per-node 2 examples/nlp_accelerate.py --zero_stage 3
    python -m hf_zero launch --num_gpus 2 examples/nlp_accelerate.py
    python examples/nlp_accelerate.py

Under `accelerate launch` the launcher's flags choose the stage; otherwise the script creates a DeepSpeedPlugin.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, set_seed
from topics import Samples, load_topics, new_model
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zero_stage", type=int, default=2, help="ZeRO stage (0 to 3), without accelerate launch")
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"], help="default: as launched, or fp32")
    parser.add_argument("--cpu", action="store_true", help="train on CPUs even if there are GPUs")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=32, help="samples per process and forward pass")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--limit", type=int, help="maximum number of samples per split, for a quick try")
    parser.add_argument("--output_dir", help="folder for the trained model")
    parser.add_argument("--local_rank", type=int, default=-1, help="passed by some launchers, unused")
    return parser.parse_args(words)


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    """Creates a plugin, unless `accelerate launch` has described one in the environment."""
    launched = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    plugin = None if launched else DeepSpeedPlugin(zero_stage=args.zero_stage, gradient_clipping=1.0)
    return Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        deepspeed_plugin=plugin,
    )


def accuracy(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader[Samples]) -> float:
    """Share of correct answers over all processes; samples that only pad the last batch are not counted twice."""
    model.eval()
    right = total = 0
    for batch in loader:
        with torch.no_grad():
            answers = model(**batch).logits.argmax(-1)
        answers, labels = accelerator.gather_for_metrics((answers, batch["labels"]))
        right += int((answers == labels).sum())
        total += len(labels)
    return right / total


def train(args: argparse.Namespace) -> float:
    """Returns the accuracy on held-out files."""
    accelerator = make_accelerator(args)
    set_seed(args.seed)
    trained_on, held_out = load_topics(args.limit)
    loader = DataLoader(trained_on, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(held_out, batch_size=4 * args.batch_size)
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    updates = args.epochs * len(loader) // args.gradient_accumulation_steps
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=updates // 10, num_training_steps=updates)
    model, optimizer, loader, test_loader, schedule = accelerator.prepare(
        model, optimizer, loader, test_loader, schedule
    )
    started = time.perf_counter()
    reached = 0.0
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        reached = accuracy(accelerator, model, test_loader)
        seconds = time.perf_counter() - started
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {reached:.3f}, {seconds:.0f} s", flush=True)
    accelerator.print(f"accuracy {reached:.3f} on held-out files; guessing reaches {held_out.commonest():.3f}")
    if args.output_dir:
        accelerator.wait_for_everyone()
        accelerator.unwrap_model(model).save_pretrained(
            args.output_dir,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
    accelerator.end_training()
    return reached


if __name__ == "__main__":
    train(arguments())
