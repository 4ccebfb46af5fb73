"""Log-probabilities of given tokens from a head whose vocabulary is cut over ranks, without the logits of all tokens.

    forward     every rank computes a few numbers per token from its columns of the logits, and gets those of the others
    backward    every rank computes its columns again, and from them its part of the gradients; the gradient of the
                hidden states is summed over ranks

Columns are computed for a few tokens at a time. The results are those of the whole vocabulary on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_zero.comm.parts import HeldPart
from hf_zero.tensor.layers import side_by_side, summed

TILE_BYTES = 1 << 27  # of a tile's logits in fp32, of which a few copies exist at the same time
TILE_TOKENS = 4096


class TokenScores(NamedTuple):
    """Numbers of each token, [tokens] each; only the first two have gradients.

    Attributes:
        log_probs: of the target.
        entropy: of the distribution, in nats.
        log_sum_sq_probs: logarithm of the sum of the squares of all probabilities.
        mean_logits: over the vocabulary.
        is_top1: whether the target is the first of the most likely tokens.
    """

    log_probs: Tensor
    entropy: Tensor
    log_sum_sq_probs: Tensor
    mean_logits: Tensor
    is_top1: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialHead:
    """This rank's rows of the head, and what is done to its output.

    Attributes:
        weight: this rank's rows, [columns of the logits, hidden].
        bias: [columns], or None.
        part: the rows of all ranks.
        scale: multiplies the logits; `softcap`, if any, then bounds them by `softcap * tanh(logits / softcap)`, and
            `temperature` divides them.
        dtype: of the products, which are rounded to it as those of a linear layer are.
    """

    weight: Tensor
    bias: Tensor | None
    part: HeldPart
    scale: float
    softcap: float | None
    temperature: float
    dtype: torch.dtype

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: if the ranks' rows are not consecutive tokens.
        """
        cut = self.part.cut
        if cut.dim != 0 or any(len(pieces) != 1 for pieces in cut.intervals):
            raise ValueError(
                f"the head's weight of shape {cut.shape} is cut along dimension {cut.dim} into {cut.intervals}: "
                "log-probabilities need consecutive rows on every rank (lm_head: colwise in the model's tp_plan)"
            )

    @property
    def first(self) -> int:
        """The token of the first column."""
        return self.part.cut.intervals[self.part.group.rank][0].start

    def tiles(self, tokens: int) -> Iterator[slice]:
        """Ranges of tokens."""
        size = max(1, min(TILE_TOKENS, TILE_BYTES // (4 * self.weight.shape[0])))
        return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))

    def logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Columns of the logits in fp32, and the tanh in them, if there is one; `hidden` is in `dtype`."""
        columns = torch.mm(hidden, self.weight.t())
        if self.bias is not None:
            columns += self.bias
        logits = columns.float() * self.scale
        if self.softcap is None:
            return logits.div_(self.temperature), None
        bounded = logits.div_(self.softcap).tanh_()
        return bounded * (self.softcap / self.temperature), bounded

    def before(self, gradient: Tensor, bounded: Tensor | None) -> Tensor:
        """The gradient of the columns before scale, softcap and temperature, from that after them."""
        if bounded is not None:
            gradient = gradient * (1 - bounded * bounded)
        return gradient.mul_(self.scale / self.temperature).to(self.dtype)


def statistics(head: PartialHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """[tokens, 7] in fp32, from this rank's columns z of the logits: max z; the sums of e = exp(z - max), of e z, of
    e^2 and of z; the target's z (0 if another rank has it); the maximum of z before the target (-inf without one)."""
    found = []
    tokens = torch.arange(head.weight.shape[0], device=hidden.device) + head.first
    for tile in head.tiles(len(targets)):
        logits, _ = head.logits(hidden[tile])
        target = targets[tile].unsqueeze(-1)
        local = (target - head.first).clamp(0, logits.shape[-1] - 1)
        is_here = (target >= head.first) & (target < head.first + logits.shape[-1])
        own = logits.gather(-1, local).where(is_here, 0.0)
        earlier = logits.masked_fill(tokens >= target, -math.inf).amax(-1)
        most, total = logits.amax(-1), logits.sum(-1)
        powers = (logits - most.unsqueeze(-1)).exp_()
        sums = [powers.sum(-1), (powers * logits).sum(-1), powers.square().sum(-1)]
        found.append(torch.stack([most, *sums, total, own.squeeze(-1), earlier], dim=-1))
    return torch.cat(found) if found else hidden.new_zeros(0, 7, dtype=torch.float32)


def combine(stats: Tensor, width: int) -> tuple[Tensor, TokenScores]:
    """The logarithm of the sum of exponentials over all columns, and the scores.

    Args:
        stats: `statistics` of every rank, [tokens, ranks, 7].
        width: of the whole vocabulary.
    """
    most, powers, weighted, squares, totals, targets, earlier = stats.unbind(-1)
    top = most.amax(-1)
    share = (most - top.unsqueeze(-1)).exp()
    power = (powers * share).sum(-1)
    log_sum = top + power.log()
    target = targets.sum(-1)
    return log_sum, TokenScores(
        log_probs=target - log_sum,
        entropy=log_sum - (weighted * share).sum(-1) / power,
        log_sum_sq_probs=(squares * share.square()).sum(-1).log() - 2 * power.log(),
        mean_logits=totals.sum(-1) / width,
        is_top1=(target >= top) & (target > earlier.amax(-1)),
    )


def forward(head: PartialHead, hidden: Tensor, targets: Tensor) -> tuple[Tensor, TokenScores]:
    """The logarithm of the sum of exponentials, which `backward` needs, and the scores. Collective: 28 bytes per token
    and rank.

    Args:
        hidden: input of the head in its dtype, [tokens, hidden], the same on all ranks.
        targets: [tokens], the same on all ranks.
    """
    group = head.part.group
    own = statistics(head, hidden, targets)
    stats = side_by_side(group, own, (own.shape[-1],) * group.size) if len(own) else own.repeat(1, group.size)
    return combine(stats.view(len(own), group.size, -1), head.part.cut.shape[0])


@dataclass(slots=True)
class Gradients:
    """Gradients of the head's input (of the whole vocabulary) and of this rank's rows, in fp32; None if not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def backward(
    head: PartialHead,
    hidden: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    of_log_probs: Tensor | None,
    of_entropy: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> Gradients:
    """The gradients, from those of the two scores. Collective if that of `hidden` is needed.

    d log_prob / dz_j = [j is the target] - p_j,    d entropy / dz_j = -p_j (log p_j + entropy)

    Args:
        log_sum, entropy: from `forward`.
        needs: which of the gradients of hidden, weight and bias to compute.
    """
    shapes = (hidden.shape, head.weight.shape, head.weight.shape[:1])
    sums = [
        hidden.new_zeros(shape, dtype=torch.float32) if need else None
        for shape, need in zip(shapes, needs, strict=True)
    ]
    found = Gradients(*sums)
    for tile in head.tiles(len(targets)):
        logits, bounded = head.logits(hidden[tile])
        log_p = logits.sub_(log_sum[tile].unsqueeze(-1))
        p = log_p.exp()
        gradient = torch.zeros_like(p)
        if of_entropy is not None:
            gradient.sub_(log_p.add_(entropy[tile].unsqueeze(-1)).mul_(p).mul_(of_entropy[tile].unsqueeze(-1)))
        if of_log_probs is not None:
            factor = of_log_probs[tile].unsqueeze(-1)
            gradient.sub_(p.mul_(factor))
            local = targets[tile].unsqueeze(-1) - head.first
            is_here = (local >= 0) & (local < p.shape[-1])
            gradient.scatter_add_(-1, local.clamp(0, p.shape[-1] - 1), factor.where(is_here, 0.0))
        columns = head.before(gradient, bounded)
        if found.hidden is not None:
            found.hidden[tile] = columns @ head.weight
        if found.weight is not None:
            found.weight += columns.t() @ hidden[tile]
        if found.bias is not None:
            found.bias += columns.sum(0, dtype=torch.float32)
    if found.hidden is not None and len(targets):
        found.hidden = summed(head.part.group, found.hidden)
    return found
