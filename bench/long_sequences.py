"""Activation memory per token and step time, with and without tiled compute, on one CPU process.

    .venv/bin/python -m bench.long_sequences --json bench/results/2026-11-22-long-sequences.json

Memory is counted, not sampled: torch.profiler records the allocations and frees of one forward and backward. Times are
those of whole steps, alternately plain and tiled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.meters import most_allocated
from bench.surroundings import about
from hf_zero import initialize

LAYERS = 4
# Ratios of Llama 3.1 8B: intermediate and vocabulary to hidden size, and its share of key heads.
INTERMEDIATE, VOCABULARY = 3.5, 31.3
BOTH = {"tiled_mlp": True, "tiled_loss": True}


def engine_for(hidden: int, tiled: dict[str, bool]) -> Any:
    """A four-layer Llama with checkpointed layers and sdpa, in fp32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=int(VOCABULARY * hidden),
        hidden_size=hidden,
        intermediate_size=int(INTERMEDIATE * hidden),
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=1 << 17,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "hf_zero": tiled,
    }
    return initialize(model=model, config=settings)[0]


def step(engine: Any, rows: int, length: int) -> float:
    """Runs one update; returns its loss."""
    ids = torch.randint(3, 1000, (rows, length), generator=torch.Generator().manual_seed(1))
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def slope(lengths: list[int], peaks: list[int]) -> float:
    """Bytes per token, by least squares."""
    return statistics.linear_regression(lengths, peaks).slope


def memory(hidden: int, tokens: list[int], row: int) -> dict[str, Any]:
    """Peaks and slopes of all ways, for numbers of tokens in rows of at most `row`."""
    found: dict[str, Any] = {"hidden": hidden, "tokens": tokens, "row": row}
    variants: dict[str, dict[str, bool]] = {"plain": {}, "tiled_loss": {"tiled_loss": True}, "tiled": BOTH}
    for name, tiled in variants.items():
        engine = engine_for(hidden, tiled)
        step(engine, 1, 256)
        peaks = [most_allocated(step, engine, max(1, count // row), min(count, row)) for count in tokens]
        found[name] = {"peak_bytes": peaks, "bytes_per_token": round(slope(tokens, peaks), 1)}
        engine.destroy()
    for name in ("tiled_loss", "tiled"):
        found[f"slope_{name}_to_plain"] = round(found[name]["bytes_per_token"] / found["plain"]["bytes_per_token"], 4)
    return found


def times(hidden: int, rows: int, length: int, rounds: int) -> dict[str, Any]:
    """Seconds per step, alternating both ways, and the ratio of each round."""
    engines = {"plain": engine_for(hidden, {}), "tiled": engine_for(hidden, BOTH)}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    losses = {}
    for number in range(rounds + 1):
        for name, engine in engines.items():
            began = time.process_time()
            losses[name] = step(engine, rows, length)
            if number:  # the first warms up
                seconds[name].append(time.process_time() - began)
    for engine in engines.values():
        engine.destroy()
    ratios = [tiled / plain for plain, tiled in zip(seconds["plain"], seconds["tiled"])]
    return {
        "hidden": hidden,
        "rows": rows,
        "length": length,
        "cpu_seconds": {name: [round(value, 2) for value in found] for name, found in seconds.items()},
        "ratios": [round(ratio, 3) for ratio in ratios],
        "median_ratio": round(statistics.median(ratios), 3),
        "losses": losses,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--row", type=int, default=1 << 20, help="maximum tokens per row")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--time", action="append", default=[], metavar="HIDDEN,ROWS,LENGTH,ROUNDS")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        **about("bench.long_sequences", "transformers"),
        "memory": memory(options.hidden, options.tokens, options.row) if options.tokens else None,
        "times": [times(*map(int, text.split(","))) for text in options.time],
    }
    text = json.dumps(report, indent=1)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
