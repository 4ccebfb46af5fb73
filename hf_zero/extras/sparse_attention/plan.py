"""What is computed: the present blocks of all heads, in groups of rows that see about as many keys.

Pure integers, made once per pattern and number of blocks. Heads of one layout go together; within them rows are sorted
into groups by their number of key blocks, so that a few rows that see everything do not make all others as wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_zero.extras.sparse_attention.layouts import Layout

_EXACT = 8  # up to so many key blocks a row is in a group of rows exactly like it


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of blocks that are computed together.

    Attributes:
        rows: their numbers.
        keys: per row its key blocks, filled up to the group's width with -1.
    """

    rows: tuple[int, ...]
    keys: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Heads of one layout."""

    heads: tuple[int, ...]
    groups: tuple[RowGroup, ...]


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """All that attention over `num_blocks` blocks computes."""

    num_blocks: int
    block: int
    parts: tuple[HeadGroup, ...]

    @property
    def computed_blocks(self) -> int:
        """Blocks of scores that are computed, over all heads, fillers included."""
        return sum(
            len(part.heads) * len(group.rows) * len(group.keys[0]) for part in self.parts for group in part.groups
        )

    @property
    def density(self) -> float:
        """Share of all blocks of scores that are computed."""
        heads = sum(len(part.heads) for part in self.parts)
        return self.computed_blocks / (heads * self.num_blocks**2)


def make_plan(layouts: Sequence[Layout], num_heads: int, block: int) -> BlockPlan:
    """`layouts`: one for all heads, or one per head."""
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
    """A width that several counts share, at most an eighth above the count."""
    if count <= _EXACT:
        return max(count, 1)
    step = 1 << (count.bit_length() - 4)
    return min(most, -(-count // step) * step)
