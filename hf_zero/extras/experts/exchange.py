"""Tokens on their way to the ranks that hold their experts, and what experts make of them on its way back.

    rank 0, tokens t0 t1 t2, two experts each           rank 0 holds e0 e1, rank 1 holds e2 e3
        rows by expert    e0:t0 e1:t2 | e2:t0 e2:t1 e3:t1 e3:t2
        sent                  here    |        to rank 1             one all-to-all of rows, of any counts
        computed          what has come for each expert, from all ranks
        sent back         the same rows in the same order            one all-to-all, counts the other way round
        added up          each token's rows, weighted where the token is: so gradients of weights do not travel

Backward sends the gradients of both along the same ways. Per token a rank sends 2 x experts per token rows of
hidden_size elements forward and as many backward, as far as the experts are on other ranks; and counts forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hf_zero.comm import Collectives, uncompiled

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From rows [n, hidden], their experts [n, 1] and weights [n, 1] to rows."""


@uncompiled
def through_experts(
    group: Collectives, hidden: Tensor, chosen: Tensor, weights: Tensor, compute: Compute, *, own: int, trains: bool
) -> Tensor:
    """What the experts of all ranks of `group` make of this rank's tokens, in the shape of `hidden`. Collective, and in
    backward again.

    Args:
        hidden: [..., hidden_size], any number of tokens on each rank.
        chosen: [tokens, k], numbers of experts.
        weights: [tokens, k].
        compute: this rank's experts, by their own numbers.
        own: how many these are; rank r has those from r * own on.
        trains: whether they want gradients.

    On the meta device, where nobody knows the way of a token, as many go to each rank.
    """
    tokens, k = chosen.shape
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    sent = torch.bincount(flat, minlength=own * group.size) if not flat.is_meta else flat.new_empty(own * group.size)
    received = torch.empty_like(sent)
    group.all_to_all(received.chunk(group.size), sent.chunk(group.size))
    if flat.is_meta:
        away = here = [(len(flat) + rank) // group.size for rank in range(group.size)]
    else:
        away, here = torch.stack([sent, received]).view(2, group.size, own).sum(-1).tolist()
    rows = hidden.reshape(tokens, -1)[order // k]
    if trains and torch.is_grad_enabled() and not rows.requires_grad:
        rows.requires_grad_()  # all ranks of the group meet in backward, also those to which no token has come
    arrived = _travel(group, rows, away, here)
    made = arrived  # as it is where nothing has come, which keeps it in the graph
    if len(arrived):
        experts = torch.arange(own, device=flat.device).repeat(group.size)
        numbers = experts.repeat_interleave(received, output_size=len(arrived))
        made = compute(arrived, numbers.unsqueeze(1), weights.new_ones(len(arrived), 1)).to(arrived.dtype)
    returned = _travel(group, made, here, away)
    by_token = returned[torch.argsort(order)].view(tokens, k, -1)
    return (by_token * weights.reshape(tokens, k, 1)).sum(1).to(hidden.dtype).view(hidden.shape)


def _travel(group: Collectives, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Of `rows` [n, hidden] the first `sent[0]` go to the first rank, and so on; returns what all have sent here."""
    return cast("Tensor", _Travel.apply(group, rows, tuple(sent), tuple(received)))


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _swapped(group, rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, _swapped(ctx.group, grads[0], ctx.received, ctx.sent), None, None


@uncompiled
def _swapped(group: Collectives, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    rows, width = rows.contiguous(), rows.shape[1]
    arrived = rows.new_empty(sum(received), width)
    group.all_to_all(
        arrived.view(-1).split([count * width for count in received]),
        rows.view(-1).split([count * width for count in sent]),
    )
    return arrived
