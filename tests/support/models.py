"""Tiny models and batches for tests: Llama-like models from a config, and a module with all kinds of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 131
IGNORED = -100

Batch = dict[str, Tensor]


def tiny_llama_config(*, tied: bool = False, layers: int = 2) -> LlamaConfig:
    """About 30 thousand parameters, with sizes that no world size divides evenly."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=36,
        intermediate_size=70,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def tiny_llama(*, tied: bool = False, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    """A newly initialised tiny Llama in fp32; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(tiny_llama_config(tied=tied, layers=layers))


def token_rows(num_rows: int, length: int = 16, seed: int = 7) -> list[dict[str, list[int]]]:
    """Learnable rows (an arithmetic walk through the vocabulary), each with a different number of ignored labels.

    The first label is always ignored: nothing predicts it, and some versions of transformers count it as a label.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(num_rows):
        start = int(torch.randint(VOCABULARY - 3, (1,), generator=generator))
        tokens = [3 + (start + (1 + number % 2) * position) % (VOCABULARY - 3) for position in range(length)]
        ignored = max(1, number % 5)
        rows.append({"input_ids": tokens, "labels": [IGNORED] * ignored + tokens[ignored:]})
    return rows


def stack(rows: list[dict[str, list[int]]]) -> Batch:
    """Rows of equal length as one batch of tensors."""
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


class AwkwardMLP(nn.Module):
    """Odd sizes, a frozen parameter, one that never gets a gradient, a tied pair, and a scalar.

    `lonely` is never used; `sometimes` is used only in batches whose flag is set, so that different parameters may get
    gradients on different ranks.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.inner = nn.Linear(7, 13)
            self.frozen = nn.Linear(13, 13)
            self.tied = nn.Linear(13, 11, bias=False)
            self.back = nn.Linear(11, 13, bias=False)
            self.head = nn.Linear(13, 3)
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.lonely = nn.Parameter(torch.randn(5))
            self.sometimes = nn.Linear(13, 13)
        self.back.weight = nn.Parameter(self.tied.weight.detach().t().contiguous())
        self.tie = nn.Linear(13, 11, bias=False)
        self.tie.weight = self.tied.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor, flag: bool = False) -> torch.Tensor:
        """The mean squared error of the batch."""
        hidden = self.frozen(torch.tanh(self.inner(x)))
        hidden = self.back(torch.relu(self.tied(hidden))) + self.back(self.tie(hidden))
        if flag:
            hidden = hidden + self.sometimes(hidden)
        return nn.functional.mse_loss(self.head(hidden) * self.scale, y)


def mlp_batches(num_batches: int, rows: int, seed: int = 11) -> list[Batch]:
    """Inputs and smooth targets for AwkwardMLP."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(num_batches):
        x = torch.randn(rows, 7, generator=generator)
        batches.append({"x": x, "y": torch.stack([x.sum(1), x[:, 0] * x[:, 1], x[:, 2].sin()], dim=1)})
    return batches


class Samples(Dataset[Batch]):
    """The rows of batches, one by one."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.rows = [
            {name: values[row] for name, values in batch.items()}
            for batch in batches
            for row in range(len(next(iter(batch.values()))))
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return self.rows[index]


def at_backward(values: Tensor, act: Callable[[], object]) -> Tensor:
    """`values`; in their backward, `act` is called."""
    return _AtBackward.apply(values, act)  # type: ignore[no-any-return,no-untyped-call]


class _AtBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, act: Callable[[], object]) -> Tensor:
        ctx.act = act
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.act()
        return gradient, None
