"""Block-sparse attention by gathering: each block of queries meets the key blocks of its row, and no others.

Exact on every device and for every block size, with dropout and additive scores; time and memory follow the number of
blocks that are computed. On accelerators `flex.py` is faster where it can be used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hf_zero.extras.sparse_attention.plan import BlockPlan, HeadGroup, RowGroup

Entries = Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]
"""(positions of queries [R, block, 1], of keys [R, 1, keys], heads) -> [B or 1, H or 1, R, block, keys]."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds besides the layout.

    Attributes:
        allowed: where a query may see a key; None: everywhere.
        added: what is added to a score; None: nothing.
        scale: of the scores; None: 1 / sqrt(head size).
        dropout: of the weights.
        kept: masks by group of rows, for calls with the same plan and the same rules.
    """

    allowed: Entries | None = None
    added: Entries | None = None
    scale: float | None = None
    dropout: float = 0.0
    kept: dict[int, Tensor | None] | None = None


def gathered_attention(query: Tensor, key: Tensor, value: Tensor, plan: BlockPlan, rules: Rules) -> Tensor:
    """[B, H, S, D] -> [B, H, S, D]; key and value may have fewer heads, each for several of the query's in turn.

    A query that sees nothing gets zeros.
    """
    length = query.shape[2]
    blocks = _Blocks(
        query=_in_blocks(query, plan),
        key=_in_blocks(key, plan),
        value=_in_blocks(value, plan),
        length=length,
        rules=rules,
    )
    heads = [head for part in plan.parts for head in part.heads]
    found = torch.cat([_heads(blocks, part) for part in plan.parts], dim=1)
    if heads != sorted(heads):
        found = found.index_select(1, _inverse(heads, found.device))
    whole: Tensor = found.flatten(2, 3)[:, :, :length]
    return whole


@dataclass(frozen=True, slots=True)
class _Blocks:
    query: Tensor  # [B, H, n, block, D]
    key: Tensor  # [B, K, n, block, D]
    value: Tensor
    length: int
    rules: Rules


def _in_blocks(tensor: Tensor, plan: BlockPlan) -> Tensor:
    missing = plan.num_blocks * plan.block - tensor.shape[2]
    padded = functional.pad(tensor, (0, 0, 0, missing)) if missing else tensor
    blocks: Tensor = padded.unflatten(2, (plan.num_blocks, plan.block))
    return blocks


def _heads(blocks: _Blocks, part: HeadGroup) -> Tensor:
    """[B, heads of the part, n, block, D]"""
    device = blocks.query.device
    per_key_head = blocks.query.shape[1] // blocks.key.shape[1]
    query = _take(blocks.query, part.heads)
    key, value = (_take(t, tuple(h // per_key_head for h in part.heads)) for t in (blocks.key, blocks.value))
    found = [_rows(query, key, value, group, part.heads, blocks) for group in part.groups]
    if len(found) == 1:
        return found[0]
    rows = [row for group in part.groups for row in group.rows]
    return torch.cat(found, dim=2).index_select(2, _inverse(rows, device))


def _rows(
    query: Tensor, key: Tensor, value: Tensor, group: RowGroup, heads: tuple[int, ...], blocks: _Blocks
) -> Tensor:
    """[B, heads, rows of the group, block, D]"""
    (batch, num_heads, _, block, size), num_rows, width = query.shape, len(group.rows), len(group.keys[0])
    device = query.device
    rows = torch.tensor(group.rows, device=device)
    keys = torch.tensor(group.keys, device=device)  # [R, width]
    chosen = keys.clamp(min=0).flatten()
    # sdpa's kernels want four dimensions: rows of blocks go with the batch.
    mine = query.index_select(2, rows).transpose(1, 2).reshape(batch * num_rows, num_heads, block, size)
    their_keys, their_values = (
        tensor.index_select(2, chosen)
        .unflatten(2, (num_rows, width))
        .permute(0, 2, 1, 3, 4, 5)
        .reshape(batch * num_rows, num_heads, width * block, tensor.shape[-1])
        for tensor in (key, value)
    )
    offsets = torch.arange(block, device=device)
    of_query = (rows[:, None] * block + offsets)[:, :, None]
    of_key = (keys[:, :, None] * block + offsets).flatten(1)[:, None, :]
    kept = blocks.rules.kept
    if kept is None or id(group) not in kept:
        mask = _mask(of_query, of_key, heads, blocks, batch)
        if kept is not None:
            kept[id(group)] = mask
    else:
        mask = kept[id(group)]
    found = functional.scaled_dot_product_attention(
        mine, their_keys, their_values, attn_mask=mask, dropout_p=blocks.rules.dropout, scale=blocks.rules.scale
    )
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        found = found.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    by_row: Tensor = found.unflatten(0, (batch, num_rows)).transpose(1, 2)
    return by_row


def _mask(of_query: Tensor, of_key: Tensor, heads: tuple[int, ...], blocks: _Blocks, batch: int) -> Tensor | None:
    """[B * R, heads or 1, block, keys], of booleans or of the scores' dtype; None where nothing is forbidden."""
    rules, length = blocks.rules, blocks.length
    present = ((of_key >= 0) & (of_key < length))[None, None]  # [1, 1, R, 1, keys]
    queries, keys = of_query.clamp(max=length - 1), of_key.clamp(0, length - 1)
    if rules.allowed is not None:
        present = present & rules.allowed(queries, keys, heads)
    elif rules.added is None and bool(present.all()):
        return None
    mask = present
    if rules.added is not None:
        added = rules.added(queries, keys, heads).to(blocks.query.dtype)
        mask = torch.where(present, added, torch.finfo(added.dtype).min)
    rows, block, width = of_query.shape[0], of_query.shape[1], of_key.shape[2]
    mask = mask.expand(batch, mask.shape[1], rows, block, width)
    return mask.transpose(1, 2).reshape(batch * rows, mask.shape[1], block, width)


def _take(tensor: Tensor, heads: tuple[int, ...]) -> Tensor:
    if heads == tuple(range(tensor.shape[1])):
        return tensor
    return tensor.index_select(1, torch.tensor(heads, device=tensor.device))


def _inverse(order: list[int], device: torch.device) -> Tensor:
    """The position of each number in `order`."""
    return torch.tensor(order, device=device).argsort()
