"""The benchmarks' model and data: a Llama-style model from a config, and random tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 0


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model and the amount of work per step."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    batch: int
    length: int


# With these micro-batches bare forward and backward take about 0.6 of a DDP step on a CPU. This is the share in real
# training of small models, and it shows an engine's overhead.
SIZES = {
    # Hundreds of parameters, just above stage 3's persistence threshold, and little arithmetic: the engine's overhead.
    "many": Size(hidden=320, intermediate=320, layers=40, vocabulary=512, batch=1, length=8),
    "1m": Size(hidden=128, intermediate=344, layers=4, vocabulary=1024, batch=1, length=64),
    "25m": Size(hidden=384, intermediate=1088, layers=10, vocabulary=8192, batch=2, length=128),
    # The same parameters with almost no arithmetic, for processors without bf16: again the engine's overhead.
    "25m-short": Size(hidden=384, intermediate=1088, layers=10, vocabulary=8192, batch=1, length=2),
    "110m": Size(hidden=768, intermediate=2048, layers=12, vocabulary=16384, batch=2, length=128),
    # For checkpoints large enough for disks to matter: 1.1 GB of fp32 weights, with the shortest possible step.
    "270m": Size(hidden=1024, intermediate=2816, layers=16, vocabulary=32000, batch=1, length=16),
}


def build_model(size: Size) -> LlamaForCausalLM:
    """The model in fp32, with the same weights on every rank and for every engine."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 64,
        num_key_value_heads=size.hidden // 64,
        max_position_embeddings=size.length,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batches(size: Size, number: int, rank: int) -> list[torch.Tensor]:
    """This rank's micro-batches of token ids."""
    generator = torch.Generator().manual_seed(SEED + 1 + rank)
    shape = (size.batch, size.length)
    return [torch.randint(size.vocabulary, shape, generator=generator) for _ in range(number)]
