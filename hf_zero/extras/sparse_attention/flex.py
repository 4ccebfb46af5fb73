"""Block-sparse attention through torch's flex_attention, compiled, on accelerators.

flex_attention works in tiles of 128 tokens: a layout in smaller blocks is computed tile by tile where any of its blocks
is present, and the blocks that are not are masked inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_zero.extras.sparse_attention.layouts import Layout

TILE = 128
MaskFunction = Callable[[Any, Any, Any, Any], Any]


def fits(block: int) -> bool:
    """Whether blocks make up tiles, or tiles blocks."""
    return TILE % block == 0 or block % TILE == 0


def tiled(layout: Layout, block: int) -> Layout:
    """The layout in tiles: those in which any block is present."""
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
    """A BlockMask of the layouts (one for all heads, or one per head) and of what is allowed besides.

    Args:
        shape: (batch, tokens).
        allowed: from numbers of sample, head, query and key; None: everything is.
    """
    from torch.nn.attention.flex_attention import BlockMask

    batch, length = shape
    in_tiles = [tiled(layout, block) for layout in layouts]
    counts, order = _tables(in_tiles, at)
    present = _present(layouts, at)  # [layouts, n, n]
    many = len(layouts) > 1

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        # Inside the last tile positions run past the end of the sequence.
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
    """Numbers of key tiles [layouts, n] and their places [layouts, n, n], int32."""
    n = len(layouts[0])
    counts = torch.tensor([[len(seen) for seen in layout] for layout in layouts], dtype=torch.int32, device=at)
    places = [[list(seen) + [0] * (n - len(seen)) for seen in layout] for layout in layouts]
    return counts, torch.tensor(places, dtype=torch.int32, device=at)


def _present(layouts: Sequence[Layout], at: torch.device) -> Tensor:
    n = len(layouts[0])
    found = torch.zeros((len(layouts), n, n), dtype=torch.bool)
    for number, layout in enumerate(layouts):
        for row, seen in enumerate(layout):
            found[number, row, list(seen)] = True
    return found.to(at)


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def flex(query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None, *, compiles: bool = True) -> Tensor:
    """[B, H, S, D] -> [B, H, S, D] under a BlockMask; key and value may have fewer heads."""
    from torch.nn.attention.flex_attention import flex_attention

    call: Any = _compiled() if compiles else flex_attention
    found: Tensor = call(query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return found
