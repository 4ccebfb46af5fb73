"""Trains a small Llama with matrices partitioned across ranks: Accelerate's loop for DeepSpeed with `autotp_size`.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --tp_size 2 --zero_stage 2 --output saved

The loop is that of any Accelerate program: the config sets the size of the tensor-parallel groups. The text is the
standard library's sources, as bytes.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp_size", type=int, default=0, help="tensor-parallel ranks; default: all")
    parser.add_argument("--zero_stage", type=int, default=1)
    parser.add_argument("--length", type=int, default=128, help="bytes per row")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--output", default="", help="folder for the full model, gathered from all ranks")
    parser.add_argument("--cpu", action="store_true", help="train on CPUs even if there are GPUs")
    return parser.parse_args(words)


def text_rows(number: int, length: int) -> list[dict[str, Tensor]]:
    """Rows of consecutive bytes."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    data = b"".join(path.read_bytes() for path in sources)[: number * length]
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long().view(-1, length)
    return [{"input_ids": row, "labels": row} for row in ids]


def main() -> None:
    options = arguments()
    set_seed(42)  # the same on all ranks: those of a tensor-parallel group must also drop the same activations
    shape = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(shape)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": options.zero_stage, "stage3_gather_16bit_weights_on_model_save": True},
        "tensor_parallel": {"autotp_size": options.tp_size or int(os.environ.get("WORLD_SIZE", "1"))},
    }
    accelerator = Accelerator(cpu=options.cpu, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = DataLoader(text_rows(options.rows, options.length), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    parts = sum(parameter.numel() for parameter in accelerator.unwrap_model(model).parameters())
    accelerator.print(f"{parts} parameters on each rank")
    for step, batch in enumerate(loader, start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.5f}")
    if options.output:
        whole = accelerator.get_state_dict(model)  # gathered from all ranks, to the first one
        accelerator.unwrap_model(model).save_pretrained(
            options.output, is_main_process=accelerator.is_main_process, state_dict=whole
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
