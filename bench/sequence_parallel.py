"""Activation memory per token on each rank, with 1, 2 and 4 ranks per sequence.

    .venv/bin/python -m torch.distributed.run --nproc-per-node 4 -m bench.sequence_parallel --json FILE

Memory is counted as in `bench.long_sequences`: the allocator's record of one forward and backward on rank 0. Memory
blocks that CPU ranks share do not belong to the allocator; each message occupies one while it is in flight.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.long_sequences import INTERMEDIATE, LAYERS, VOCABULARY, slope
from bench.meters import most_allocated
from bench.surroundings import about
from hf_zero import initialize
from hf_zero.comm import this_process
from hf_zero.sequence.batches import part_of

LAUNCH = ("python", "-m", "torch.distributed.run", "--nproc-per-node", "RANKS", "-m")


def engine_for(hidden: int, size: int) -> Any:
    """A four-layer Llama with checkpointed layers and sdpa, in fp32, for sequences over `size` ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=int(VOCABULARY * hidden),
        hidden_size=hidden,
        intermediate_size=int(INTERMEDIATE * hidden),
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "sequence_parallel_size": size,
    }
    return initialize(model=model, config=settings)[0]


def step(engine: Any, rows: int, length: int) -> None:
    """One update on this rank's part of `rows` sequences."""
    ids = torch.randint(3, 1000, (rows, length), generator=torch.Generator().manual_seed(1))
    group = engine.groups.sample
    part = part_of({"input_ids": ids, "labels": ids}, group.rank, group.size)
    engine.backward(engine(**part, labels=part["shift_labels"]).loss)
    engine.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="tokens of all rows")
    parser.add_argument("--row", type=int, default=2048, help="tokens per row")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for size in options.sizes:
        engine = engine_for(options.hidden, size)
        step(engine, 1, 256)
        peaks = [most_allocated(step, engine, count // options.row, options.row) for count in options.tokens]
        found[str(size)] = {"peak_bytes": peaks, "bytes_per_token": round(slope(options.tokens, peaks), 1)}
        engine.destroy()
    first = found[str(options.sizes[0])]["bytes_per_token"]
    for entry in found.values():
        entry["slope_to_first"] = round(entry["bytes_per_token"] / first, 4)
    report = {
        **about("bench.sequence_parallel", "transformers", launcher=LAUNCH),
        "ranks": this_process().size,
        "hidden": options.hidden,
        "layers": LAYERS,
        "tokens": options.tokens,
        "row": options.row,
        "by_ranks_per_sequence": found,
    }
    if this_process().rank == 0:
        text = json.dumps(report, indent=1) + "\n"
        sys.stdout.write(text)
        if options.json is not None:
            options.json.write_text(text)


if __name__ == "__main__":
    main()
