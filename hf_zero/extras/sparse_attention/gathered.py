"""Block-sparse attention by gathering: for each block of queries, only the key blocks of its row are computed.

It is exact on every device and for every block size, with dropout and additive scores; time and memory are proportional
to the number of computed blocks. On accelerators, PyTorch's flex attention is faster if it is applicable.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hf_zero.extras.sparse_attention.sparsity import Layout

# The plan: the present blocks of all heads, in groups of rows with about the same number of keys.
#
# It consists of integers, and is made once per pattern and number of blocks. Heads with the same layout are computed
# together; their rows are grouped by the number of key blocks, so that the padding of short rows stays small even if a
# few rows attend to everything.


_EXACT = 8  # rows with up to this number of key blocks are grouped by the exact number


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of blocks that are computed together.

    Attributes:
        rows: their indices.
        keys: key blocks of each row, padded to the group's width with -1.
    """

    rows: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Heads with the same layout."""

    heads: tuple[int, ...]
    groups: tuple[RowGroup, ...]


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """All blocks that attention over `num_blocks` blocks computes."""

    num_blocks: int
    block: int
    parts: tuple[HeadGroup, ...]

    @property
    def computed_blocks(self) -> int:
        """Number of computed score blocks over all heads, including padding."""
        return sum(
            len(part.heads) * len(group.rows) * len(group.keys[0]) for part in self.parts for group in part.groups
        )

    @property
    def density(self) -> float:
        """The fraction of all score blocks that is computed."""
        heads = sum(len(part.heads) for part in self.parts)
        return self.computed_blocks / (heads * self.num_blocks**2)


def make_plan(layouts: Sequence[Layout], num_heads: int, block: int) -> BlockPlan:
    """The plan for `layouts`: one for all heads, or one per head."""
    of_layout: dict[Layout, list[int]] = {}
    for head in range(num_heads):
        of_layout.setdefault(layouts[head % len(layouts)], []).append(head)
    parts = tuple(HeadGroup(tuple(heads), _row_groups(layout)) for layout, heads in of_layout.items())
    return BlockPlan(num_blocks=len(layouts[0]), block=block, parts=parts)


def _row_groups(layout: Layout) -> tuple[RowGroup, ...]:
    by_width: dict[int, list[int]] = {}
    for row, seen in enumerate(layout):
        by_width.setdefault(_width(len(seen), len(layout)), []).append(row)
    return tuple(
        RowGroup(tuple(rows), tuple(layout[row] + (-1,) * (width - len(layout[row])) for row in rows))
        for width, rows in sorted(by_width.items())
    )


def _width(count: int, most: int) -> int:
    """The count rounded up by at most an eighth, so that similar counts share a width."""
    if count <= _EXACT:
        return max(count, 1)
    step = 1 << (count.bit_length() - 4)
    return min(most, -(-count // step) * step)


Entries = Callable[[Tensor, Tensor, tuple[int, ...]], Tensor]
"""(positions of queries [R, block, 1], of keys [R, 1, keys], heads) -> [B or 1, H or 1, R, block, keys]."""


def entries_of(table: Tensor) -> Entries:
    """A function that returns entries of a table that broadcasts to [B, H, S, S]."""
    full = table.reshape((1,) * (4 - table.dim()) + tuple(table.shape))

    def entries(queries: Tensor, keys: Tensor, heads: tuple[int, ...]) -> Tensor:
        mine = full if full.shape[1] == 1 else full[:, list(heads)]
        return mine[:, :, queries if mine.shape[2] > 1 else queries * 0, keys]

    return entries


@dataclass(frozen=True, slots=True)
class Rules:
    """Attention settings in addition to the layout.

    Attributes:
        allowed: whether a query may attend to a key; None: always.
        added: bias added to the scores; None: none.
        scale: scale of the scores; None: 1 / sqrt(head size).
        dropout: dropout probability of the attention weights.
        kept: cache of masks by row group, for calls with the same plan and rules.
    """

    allowed: Entries | None = None
    added: Entries | None = None
    scale: float | None = None
    dropout: float = 0.0
    kept: dict[int, Tensor | None] | None = None


def gathered_attention(query: Tensor, key: Tensor, value: Tensor, plan: BlockPlan, rules: Rules) -> Tensor:
    """Attention [B, H, S, D] -> [B, H, S, D]; key and value may have fewer heads, as in grouped-query attention.

    The output of a query without allowed keys is zero.
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
    attended = torch.cat([_heads(blocks, part) for part in plan.parts], dim=1)
    if heads != sorted(heads):
        attended = attended.index_select(1, _inverse(heads, attended.device))
    whole: Tensor = attended.flatten(2, 3)[:, :, :length]
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
    attended = [_rows(query, key, value, group, part.heads, blocks) for group in part.groups]
    if len(attended) == 1:
        return attended[0]
    rows = [row for group in part.groups for row in group.rows]
    return torch.cat(attended, dim=2).index_select(2, _inverse(rows, device))


def _rows(
    query: Tensor, key: Tensor, value: Tensor, group: RowGroup, heads: tuple[int, ...], blocks: _Blocks
) -> Tensor:
    """[B, heads, rows of the group, block, D]"""
    (batch, num_heads, _, block, size), num_rows, width = query.shape, len(group.rows), len(group.keys[0])
    device = query.device
    rows = torch.tensor(group.rows, device=device)
    keys = torch.tensor(group.keys, device=device)  # [R, width]
    chosen = keys.clamp(min=0).flatten()
    # SDPA kernels need four dimensions: rows of blocks become part of the batch dimension.
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
    kept = {} if blocks.rules.kept is None else blocks.rules.kept
    if id(group) not in kept:
        kept[id(group)] = _mask(of_query, of_key, heads, blocks, batch)
    mask = kept[id(group)]
    attended = functional.scaled_dot_product_attention(
        mine, their_keys, their_values, attn_mask=mask, dropout_p=blocks.rules.dropout, scale=blocks.rules.scale
    )
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        attended = attended.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    by_row: Tensor = attended.unflatten(0, (batch, num_rows)).transpose(1, 2)
    return by_row


def _mask(of_query: Tensor, of_key: Tensor, heads: tuple[int, ...], blocks: _Blocks, batch: int) -> Tensor | None:
    """[B * R, heads or 1, block, keys], boolean or in the scores' dtype; None if all keys are allowed."""
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
    return torch.tensor(order, device=device).argsort()


# Block-sparse attention through torch's flex_attention, compiled, on accelerators.
#
# flex_attention uses tiles of 128 tokens: with smaller blocks, every tile that contains a present block is computed,
# and absent blocks within it are masked.


TILE = 128
MaskFunction = Callable[[Any, Any, Any, Any], Any]


def fits(block: int) -> bool:
    """Whether the block size divides the tile size, or vice versa."""
    return TILE % block == 0 or block % TILE == 0


def tiled(layout: Layout, block: int) -> Layout:
    """The layout in tiles: a tile is present if any of its blocks is."""
    num_tiles = -(-len(layout) * block // TILE)
    tiles: list[set[int]] = [set() for _ in range(num_tiles)]
    for row, seen in enumerate(layout):
        across = {tile for key in seen for tile in _tiles_of(key, block, num_tiles)}
        for tile in _tiles_of(row, block, num_tiles):
            tiles[tile] |= across
    return tuple(tuple(sorted(seen)) for seen in tiles)


def _tiles_of(number: int, block: int, num_tiles: int) -> range:
    return range(number * block // TILE, min(num_tiles, -(-(number + 1) * block // TILE)))


def block_mask(
    layouts: Sequence[Layout], block: int, shape: tuple[int, int], allowed: MaskFunction | None, at: torch.device
) -> Any:
    """A BlockMask of the layouts (one for all heads, or one per head), combined with `allowed`.

    Args:
        shape: (batch, tokens).
        allowed: function of the indices of sample, head, query and key; None: everything is allowed.
    """
    from torch.nn.attention.flex_attention import BlockMask

    batch, length = shape
    in_tiles = [tiled(layout, block) for layout in layouts]
    counts, order = _tables(in_tiles, at)
    present = _present(layouts, at)  # [layouts, n, n]
    many = len(layouts) > 1

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        # Positions in the last tile may exceed the sequence.
        inside = (q < length) & (kv < length)
        q, kv = q.clamp(max=length - 1), kv.clamp(max=length - 1)
        seen = present[h if many else 0, q // block, kv // block]
        if allowed is not None:
            seen = seen & allowed(b, h, q, kv)
        return seen & inside

    return BlockMask.from_kv_blocks(
        _spread(counts, batch), _spread(order, batch), BLOCK_SIZE=TILE, mask_mod=mask_mod, seq_lengths=(length, length)
    )


def _spread(table: Tensor, batch: int) -> Tensor:
    """[layouts, ...] -> [B, H, ...]"""
    return table.expand(batch, *table.shape).contiguous()


def _tables(layouts: Sequence[Layout], at: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers of key tiles [layouts, n] and their indices [layouts, n, n], int32."""
    n = len(layouts[0])
    counts = torch.tensor([[len(seen) for seen in layout] for layout in layouts], dtype=torch.int32, device=at)
    places = [[list(seen) + [0] * (n - len(seen)) for seen in layout] for layout in layouts]
    return counts, torch.tensor(places, dtype=torch.int32, device=at)


def _present(layouts: Sequence[Layout], at: torch.device) -> Tensor:
    n = len(layouts[0])
    present = torch.zeros((len(layouts), n, n), dtype=torch.bool)
    for number, layout in enumerate(layouts):
        for row, seen in enumerate(layout):
            present[number, row, list(seen)] = True
    return present.to(at)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def flex(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None, *, compiles: bool = True) -> Tensor:
    """Attention [B, H, S, D] -> [B, H, S, D] with a BlockMask; key and value may have fewer heads."""
    from torch.nn.attention.flex_attention import flex_attention

    call: Any = _compiled() if compiles else flex_attention
    attended: Tensor = call(query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return attended
