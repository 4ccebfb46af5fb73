"""Ulysses for custom attention: DeepSpeed's `DistributedAttention`, for models outside transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives, LoneCollectives, NativeCollectives, uncompiled
from hf_zero.sequence.shared import check_heads, copies_of_key_heads

# Ranks that share sequences exchange one dimension of tensors for another, differentiably: heads for positions.


# [batch, heads, positions, head_dim]
HEADS, POSITIONS = 1, 2


def exchange(group: Collectives, tensors: Sequence[Tensor], split: int, join: int) -> list[Tensor]:
    """Send rank r the r-th of `group.size` equal parts along `split`, and concatenate the received parts along `join`.

        exchange(group, [q], split=HEADS, join=POSITIONS)       q: [b, H, l, d] of this rank's positions
                                                             -> [b, H / n, n * l, d]: all positions, some heads

    All tensors are sent in one message. Backward exchanges gradients in the reverse direction. Collective.

    Args:
        tensors: of any shapes, which must be the same on all ranks, and one dtype; the size along `split` must be a
            multiple of `group.size`.
    """
    return list(cast("tuple[Tensor, ...]", _HeadsForPositions.apply(group, split, join, *tensors)))


class _HeadsForPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Collectives, split: int, join: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.split, ctx.join = group, split, join
        return _swapped_evenly(group, tensors, split, join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, None, *_swapped_evenly(ctx.group, grads, ctx.join, ctx.split)


@uncompiled
def _swapped_evenly(group: Collectives, tensors: Sequence[Tensor], split: int, join: int) -> tuple[Tensor, ...]:
    parts = [tensor.unflatten(split, (group.size, -1)).movedim(split, 0) for tensor in tensors]
    sizes = [part[0].numel() for part in parts]
    message = torch.empty(group.size, sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    for part, place in zip(parts, message.split(sizes, dim=1), strict=True):
        place.unflatten(1, part.shape[1:]).copy_(part)
    rows = group.exchange_rows(message.view(-1), lambda numel: message.new_empty(numel))
    rows.wait()
    extents = [part.shape[1:][join] for part in parts]
    joined = []
    for part, extent in zip(parts, extents, strict=True):
        shape = list(part.shape[1:])
        shape[join] = group.size * extent
        joined.append(part.new_empty(shape))
    for rank in range(group.size):
        pieces = rows.row(rank)[: sum(sizes)].split(sizes)
        for whole, part, piece, extent in zip(joined, parts, pieces, extents, strict=True):
            whole.narrow(join, rank * extent, extent).copy_(piece.view(part.shape[1:]))
    rows.give_back()
    return tuple(joined)


def gather(group: Collectives, tensor: Tensor, dim: int) -> Tensor:
    """Concatenate all ranks' `tensor`, of the same shape, along `dim`. Not differentiable. Collective."""
    flat = torch.empty(group.size, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    flat[group.rank] = tensor.reshape(-1)
    group.all_gather(flat.view(-1)).wait()
    return torch.cat([row.view(tensor.shape) for row in flat], dim=dim)


def told_by_all(group: Collectives, values: Sequence[int], device: torch.device) -> list[list[int]]:
    """Exchange integers in host memory among all ranks. Collective, without synchronizing the device."""
    facts = [0.0] * (group.size * len(values))
    start = group.rank * len(values)
    facts[start : start + len(values)] = [float(value) for value in values]
    all_facts = group.sum_with_facts(torch.zeros(1, dtype=torch.float64, device=device), facts)
    return [[int(value) for value in all_facts[rank * len(values) :][: len(values)]] for rank in range(group.size)]


class DistributedAttention(nn.Module):
    """Attention over whole sequences, of which each rank has a part.

    `local_attention(query, key, value, *args, **kwargs)` gets all positions and some of the heads, and returns an
    output with the layout of `query`.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        """
        Args:
            local_attention: a module or function.
            sequence_process_group: torch group of the ranks that share sequences; None: only this rank.
            scatter_idx: dimension of the heads.
            gather_idx: accepted for compatibility: forward's `batch_dim_idx` determines the dimension of positions.
            sp_stream: accepted for compatibility.
            num_kv_heads: number of key heads.
        """
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx
        self.num_kv_heads = num_kv_heads
        alone = sequence_process_group is None
        self._group: Collectives = LoneCollectives() if alone else NativeCollectives(sequence_process_group)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int = 1,
        rotary_pos_emb: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Collective.

        Args:
            query, key, value: [positions, batch, heads, d] with `batch_dim_idx` 1, [batch, positions, heads, d] with
                0; all ranks must have the same number of positions. `key` and `value` may have fewer heads.

        Raises:
            ValueError: if heads cannot be divided: their number is not a multiple of the ranks, and there are fewer
                key heads than ranks.
        """
        if rotary_pos_emb is not None:
            raise NotImplementedError("rotary_pos_emb: apply it to query and key before, by positions in whole rows")
        size, heads, positions = self._group.size, self.scatter_idx, 1 - batch_dim_idx
        num_heads, num_key_heads = query.shape[heads], key.shape[heads]
        if num_heads % size and num_key_heads >= size:
            return self._uneven(query, key, value, positions, *args, **kwargs)
        check_heads(num_heads, size)
        copies = copies_of_key_heads(num_key_heads, size)
        if copies > 1:
            key, value = key.repeat_interleave(copies, dim=heads), value.repeat_interleave(copies, dim=heads)
        whole = exchange(self._group, [query, key, value], split=heads, join=positions)
        output = self.local_attn(*whole, *args, **kwargs)
        (own,) = exchange(self._group, [output], split=positions, join=heads)
        return own

    def _uneven(self, query: Tensor, key: Tensor, value: Tensor, positions: int, *args: Any, **kwargs: Any) -> Tensor:
        """Give every rank whole key heads with their query heads; the first ranks may get one more."""
        group, heads, num_key_heads = self._group, self.scatter_idx, key.shape[self.scatter_idx]
        shares = [num_key_heads // group.size + (rank < num_key_heads % group.size) for rank in range(group.size)]
        per_key = query.shape[heads] // num_key_heads
        of_query = [share * per_key for share in shares]
        whole = [
            _Uneven.apply(_to_heads, _to_positions, group, heads, positions, of_rank, tensor)
            for tensor, of_rank in ((query, of_query), (key, shares), (value, shares))
        ]
        output = self.local_attn(*whole, *args, **kwargs)
        own: Tensor = _Uneven.apply(_to_positions, _to_heads, group, heads, positions, of_query, output)
        return own


class _Uneven(torch.autograd.Function):
    """Exchanges with different numbers of heads per rank: `forth` in forward, and `back` in backward."""

    @staticmethod
    def forward(ctx: Any, forth: Callable[..., Tensor], back: Callable[..., Tensor], *arguments: Any) -> Tensor:
        *ctx.where, tensor = arguments
        ctx.back = back
        return forth(*ctx.where, tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *(None,) * (len(ctx.where) + 2), ctx.back(*ctx.where, grad)


def _to_heads(group: Collectives, heads: int, positions: int, shares: Sequence[int], tensor: Tensor) -> Tensor:
    sent = list(tensor.split(list(shares), dim=heads))
    return _swapped(group, sent, [sent[group.rank].shape] * group.size, positions)


def _to_positions(group: Collectives, heads: int, positions: int, shares: Sequence[int], tensor: Tensor) -> Tensor:
    sent = list(tensor.chunk(group.size, dim=positions))
    shapes = [torch.Size([*part.shape[:heads], share, *part.shape[heads + 1 :]]) for part, share in zip(sent, shares)]
    return _swapped(group, sent, shapes, heads)


def _swapped(group: Collectives, sent: Sequence[Tensor], shapes: Sequence[torch.Size], join: int) -> Tensor:
    received = [sent[0].new_empty(shape.numel()) for shape in shapes]
    group.all_to_all(received, [part.reshape(-1) for part in sent])
    return torch.cat([part.view(shape) for part, shape in zip(received, shapes, strict=True)], dim=join)
