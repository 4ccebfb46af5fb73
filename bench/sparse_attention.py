"""Time and memory of sparse attention by the density of its pattern, on one CPU process.

    python -m bench.sparse_attention --name 8k

Forward and backward of one layer's attention in fp32, alternating all patterns and torch's scaled_dot_product_attention
over all tokens. Memory is counted, not sampled: torch.profiler records the allocator's peak. Density is the share of
blocks that are computed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bench.meters import most_allocated
from bench.surroundings import about, keep
from hf_zero.extras.sparse_attention.gathered import Rules, gathered_attention, make_plan
from hf_zero.extras.sparse_attention.sparsity import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
)

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
WHOLE = "scaled_dot_product_attention"


def patterns(heads: int, block: int) -> dict[str, SparsityConfig]:
    """Patterns from sparse to dense."""
    both = {"attention": "bidirectional"}
    windows = {
        f"window of {2 * near + 1} blocks": LocalSlidingWindowSparsityConfig(
            heads, block=block, num_sliding_window_blocks=2 * near + 1, **both
        )
        for near in (1, 4, 8, 16, 32)
    }
    others = {
        "bslongformer": BSLongformerSparsityConfig(heads, block=block, **both),
        "bigbird": BigBirdSparsityConfig(heads, block=block, **both),
        "fixed": FixedSparsityConfig(heads, block=block, num_local_blocks=8, **both),
    }
    return {**windows, **others, "dense": DenseSparsityConfig(heads, block=block)}


def attention_of(config: SparsityConfig, tokens: int) -> tuple[Attention, float]:
    """Attention with this pattern, and its density."""
    found = config.make_layout(tokens)
    layouts = [tuple(tuple(row.nonzero().flatten().tolist()) for row in head) for head in found]
    plan = make_plan(layouts, config.num_heads, config.block)
    kept: dict[int, Tensor | None] = {}
    return lambda q, k, v: gathered_attention(q, k, v, plan, Rules(kept=kept)), plan.density


def once(attention: Attention, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    """CPU seconds of forward and backward."""
    for tensor in inputs:
        tensor.grad = None
    began = time.process_time()
    attention(*inputs).square().sum().backward()
    return time.process_time() - began


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    torch.manual_seed(0)
    shape = (1, options.heads, options.tokens, options.head_size)
    inputs = tuple(torch.randn(shape, requires_grad=True) for _ in range(3))
    ways: dict[str, tuple[Attention, float]] = {WHOLE: (functional.scaled_dot_product_attention, 1.0)}
    for name, config in patterns(options.heads, options.block).items():
        ways[name] = attention_of(config, options.tokens)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name, (attention, _) in ways.items():
            taken = once(attention, inputs)  # type: ignore[arg-type]
            if turn:  # the first warms up
                seconds[name].append(taken)
    return {
        name: {"density": density, "seconds": seconds[name], "peak_bytes": most_allocated(once, attention, inputs)}
        for name, (attention, density) in ways.items()
    }


def report(found: dict[str, dict[str, Any]], options: argparse.Namespace) -> str:
    """The table in Markdown."""
    lines = [
        f"Forward and backward of attention over {options.tokens} tokens, {options.heads} heads of "
        f"{options.head_size}, blocks of {options.block}, fp32, one CPU core; medians of {options.rounds} rounds with "
        "their range. Shares are of the dense pattern.\n",
        "| pattern | density | CPU seconds | range | of dense | most memory at once, MiB | of dense |",
        "|---|---|---|---|---|---|---|",
    ]
    dense = found["dense"]
    base = statistics.median(dense["seconds"])
    for name, one in sorted(found.items(), key=lambda item: (item[0] == WHOLE, item[1]["density"])):
        taken = statistics.median(one["seconds"])
        cells = [
            name,
            f"{one['density']:.3f}",
            f"{taken:.2f}",
            f"{min(one['seconds']):.2f}-{max(one['seconds']):.2f}",
            f"{taken / base:.3f}",
            f"{one['peak_bytes'] / 2**20:.0f}",
            f"{one['peak_bytes'] / dense['peak_bytes']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--block", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(options)
    content = {**about("bench.sparse_attention"), "patterns": found}
    text = report(found, options)
    keep(content, text, f"sparse-attention-{options.name}")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
