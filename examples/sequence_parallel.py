"""Trains a small model on long rows of bytes, split over several ranks: Accelerate's loop for sequence parallelism.

    torchrun --nproc-per-node 2 examples/sequence_parallel.py
    torchrun --nproc-per-node 4 examples/sequence_parallel.py --sp_size 2 --zero_stage 3
    torchrun --nproc-per-node 2 examples/sequence_parallel.py --hybrid

The text is the standard library's sources. The loss of a step is the mean of the ranks' losses, weighted by tokens.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, ParallelismConfig, set_seed
from torch import Tensor
from torch.distributed.nn.functional import all_gather
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sp_size", type=int, default=0, help="ranks per sequence; default: all")
    parser.add_argument("--zero_stage", type=int, default=2)
    parser.add_argument("--length", type=int, default=512, help="bytes per row")
    parser.add_argument("--hybrid", action="store_true", help="an LFM2, where every other layer is a convolution")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--cpu", action="store_true", help="train on CPUs even if there are GPUs")
    return parser.parse_args(words)


def text_rows(number: int, length: int) -> list[dict[str, Tensor]]:
    """Rows of consecutive bytes, with their position ids."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    data = b"".join(path.read_bytes() for path in sources)[: number * length]
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long().view(-1, length)
    return [{"input_ids": row, "labels": row, "position_ids": torch.arange(length)} for row in ids]


def whole_loss(own: Tensor, labels: Tensor, group: object) -> Tensor:
    """The mean over all tokens of the sequences, from each rank's mean over its own tokens."""
    losses = torch.stack(all_gather(own, group=group))
    tokens = torch.stack(all_gather((labels != -100).sum(), group=group))
    return torch.where(tokens > 0, losses * tokens, 0.0).sum() / tokens.sum().clamp(min=1)


def main() -> None:
    options = arguments()
    set_seed(42)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    layers = {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 4} if options.hybrid else {}
    shape = AutoConfig.for_model("lfm2" if options.hybrid else "llama", vocab_size=256, **sizes, **layers)
    # Created before stage 3 is configured, which partitions models on creation: all stages get the same weights.
    model = AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    size = options.sp_size or world
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": options.zero_stage},
    }
    accelerator = Accelerator(
        cpu=options.cpu,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        parallelism_config=ParallelismConfig(sp_size=size, dp_shard_size=world // size, sp_backend="deepspeed"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = DataLoader(text_rows(options.rows, options.length), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    from deepspeed.utils import groups

    plain, step = accelerator.unwrap_model(model), 0
    for batch in loader:
        labels = batch.pop("shift_labels")
        logits = model(**batch).logits
        loss = plain.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=shape.vocab_size)
        if size > 1:
            loss = whole_loss(loss, labels, groups._get_sequence_parallel_group())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        accelerator.print(f"step {step}: {tuple(batch['input_ids'].shape)} of each row, loss {loss.item():.5f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
