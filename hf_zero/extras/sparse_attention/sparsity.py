"""DeepSpeed's SparsityConfig classes: validated settings of a pattern, and its layout."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Layouts as pure functions of integers.
#
# A layout has one tuple per block of queries: the key blocks it attends to, ascending. n is the number of blocks;
# `head` is an index, because heads may differ. Patterns are DeepSpeed's (deepspeed.ops.sparse_attention, up to 0.19.6);
# random ones are functions of a seed.
#
#     fixed, n = 8, windows of 4, one global block       row 0..3   # # # # . . . #
#                                                        row 4..7   . . . # # # # #


Layout = tuple[tuple[int, ...], ...]
Span = tuple[int, int]  # [first, last) of a range of blocks


def _windows(n: int, sizes: Sequence[int], *, causal: bool) -> list[set[int]]:
    rows: list[set[int]] = []
    for size in (*sizes, *[sizes[-1]] * n):
        start, end = len(rows), min(n, len(rows) + size)
        rows += [set(range(start, row + 1 if causal else end)) for row in range(start, end)]
        if end == n:
            break
    return rows


def _neighbours(n: int, num_sliding: int) -> list[set[int]]:
    reach = num_sliding // 2
    return [set(range(max(0, row - reach), min(n, row + reach + 1))) for row in range(n)]


def _add_global(rows: list[set[int]], spans: Iterable[Span], *, causal: bool, horizontal: bool) -> None:
    for first, last in spans:
        if horizontal:
            for row in range(first, last):
                rows[row].update(range(len(rows)))
        for seen in rows[first if causal else 0 :]:
            seen.update(range(first, last))


def _clipped(spans: Iterable[Span], n: int) -> list[Span]:
    return [(first, min(last, n)) for first, last in spans if first < n]


def _draw(below: int, number: int, seed: int, head: int, row: int) -> list[int]:
    if not number:
        return []
    return random.Random(f"{seed} {head} {row}").sample(range(below), number)


def _frozen(rows: Sequence[set[int]], *, causal: bool = False) -> Layout:
    if causal:
        return tuple(tuple(sorted(key for key in seen if key <= row)) for row, seen in enumerate(rows))
    return tuple(tuple(sorted(seen)) for seen in rows)


@dataclass(eq=False)
class SparsityConfig:
    """Base class of all patterns.

    Args:
        num_heads: number of query heads.
        block: tokens per block of queries and of keys.
        different_layout_per_head: whether heads have different layouts; otherwise all use that of head 0.

    Raises:
        ValueError: for a setting outside its range; NotImplementedError for an unknown value of `attention`.
    """

    attention = "bidirectional"
    horizontal_global_attention = False
    num_heads: int
    block: int = 16
    different_layout_per_head: bool = False

    def __post_init__(self) -> None:
        self._require(num_heads=1, block=1)
        if self.attention not in ("unidirectional", "bidirectional"):
            raise NotImplementedError(f'attention = {self.attention!r} must be "unidirectional" or "bidirectional"')
        if self.horizontal_global_attention and self.is_causal:
            raise ValueError(
                "horizontal_global_attention makes blocks attend to later ones, which unidirectional attention "
                "forbids: change one of them"
            )
        self.num_layout_heads = self.num_heads if self.different_layout_per_head else 1

    def _require(self, **least: int) -> None:
        """Check that these settings have at least these values."""
        for name, value in least.items():
            _at_least(name, getattr(self, name), value)

    @property
    def is_causal(self) -> bool:
        """Whether blocks do not attend to later ones."""
        return self.attention == "unidirectional"

    def rows(self, n: int, head: int = 0) -> Layout:
        """The layout of one head."""
        raise NotImplementedError(
            f"{type(self).__name__} defines no pattern: use FixedSparsityConfig or another subclass"
        )

    def least_blocks(self) -> int:
        """The minimum number of blocks of the pattern."""
        return 1

    def head_rows(self, num_blocks: int) -> list[Layout]:
        """One layout, or one per head. Sequences too short for the pattern use the corner of the smallest layout.

        Unlike `make_layout`, this supports sequences of any length.
        """
        whole = max(num_blocks, self.least_blocks())
        layouts = [self.rows(whole, head) for head in range(self.num_layout_heads)]
        if whole == num_blocks:
            return layouts
        return [tuple(tuple(k for k in row if k < num_blocks) for row in rows[:num_blocks]) for rows in layouts]

    def make_layout(self, seq_len: int) -> Tensor:
        """int64 [num_heads, seq_len / block, seq_len / block]: 1 for present blocks."""
        layout = self.setup_layout(seq_len)
        num_blocks = layout.shape[1]
        if num_blocks < self.least_blocks():
            raise ValueError(
                f"{type(self).__name__}.make_layout({seq_len}): {num_blocks} blocks of {self.block} are fewer than the "
                f"pattern's {self.least_blocks()}; use longer sequences, smaller blocks or a smaller pattern"
            )
        for head in range(self.num_layout_heads):
            for row, seen in enumerate(self.rows(num_blocks, head)):
                layout[head, row, list(seen)] = 1
        return self.check_and_propagate_first_head_layout(layout)

    def setup_layout(self, seq_len: int) -> Tensor:
        """A zero tensor with the layout's shape."""
        if seq_len < self.block or seq_len % self.block:
            raise ValueError(
                f"make_layout({seq_len}): the length must be a positive multiple of block = {self.block}; pad the "
                "sequence (SparseAttentionUtils.pad_to_block_size)"
            )
        import torch  # here, because the config's checks read the patterns without it

        num_blocks = seq_len // self.block
        return torch.zeros((self.num_heads, num_blocks, num_blocks), dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Copy the first head's layout to all heads, unless heads differ."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout


class DenseSparsityConfig(SparsityConfig):
    """All blocks are present."""

    def rows(self, n: int, head: int = 0) -> Layout:
        return (tuple(range(n)),) * n


@dataclass(eq=False)
class FixedSparsityConfig(SparsityConfig):
    """Windows, and global blocks in each window that others attend to (Sparse Transformer, arXiv 1904.10509)."""

    num_local_blocks: int = 4
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    num_different_global_patterns: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(num_local_blocks=1, num_global_blocks=1, num_different_global_patterns=1)
        num_local, num_global = self.num_local_blocks, self.num_global_blocks
        patterns = self.num_different_global_patterns
        if num_local % num_global:
            raise ValueError(f"num_local_blocks = {num_local} must be a multiple of num_global_blocks = {num_global}")
        if patterns > 1 and not self.different_layout_per_head:
            raise ValueError(f"num_different_global_patterns = {patterns} needs different_layout_per_head")
        if patterns > num_local // num_global:
            raise ValueError(
                f"num_different_global_patterns = {patterns} is more than num_local_blocks // num_global_blocks = "
                f"{num_local // num_global}"
            )

    def least_blocks(self) -> int:
        return self.num_global_blocks

    def rows(self, n: int, head: int = 0) -> Layout:
        """Windows, and the last blocks of every window as global blocks for all later windows (or all windows); head h
        shifts them to the front by h mod the number of patterns."""
        num_local, num_global = self.num_local_blocks, self.num_global_blocks
        back = num_local - (1 + head % self.num_different_global_patterns) * num_global
        spans = [(start + back, start + back + num_global) for start in range(0, n - num_local + 1, num_local)]
        rest = n % num_local
        if rest:  # global blocks of a short last window are moved inside, if possible
            first = max(0, min(n - rest + back, n - num_global))
            spans.append((first, first + num_global))
        rows = _windows(n, [num_local], causal=self.is_causal)
        _add_global(rows, spans, causal=self.is_causal, horizontal=self.horizontal_global_attention)
        return _frozen(rows)


@dataclass(eq=False)
class VariableSparsityConfig(SparsityConfig):
    """Windows of several sizes, listed global blocks, and random blocks."""

    num_random_blocks: int = 0
    local_window_blocks: Sequence[int] = (4,)
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"
    horizontal_global_attention: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(num_random_blocks=0)
        if not self.local_window_blocks:
            raise ValueError("local_window_blocks must list at least one size")
        for size in self.local_window_blocks:
            _at_least("local_window_blocks", size, 1)
        self.local_window_blocks = list(self.local_window_blocks)
        self.global_block_indices = list(self.global_block_indices)
        self._spans = _spans(self.global_block_indices, self.global_block_end_indices)

    def least_blocks(self) -> int:
        return max(1, self.num_random_blocks)

    def rows(self, n: int, head: int = 0) -> Layout:
        """Windows of the listed sizes, with the last one repeated; random blocks in every row, including later keys."""
        rows = _windows(n, self.local_window_blocks, causal=self.is_causal)
        for row, seen in enumerate(rows):
            seen.update(_draw(n, self.num_random_blocks, self.seed, head, row))
        spans = _clipped(self._spans, n)
        _add_global(rows, spans, causal=self.is_causal, horizontal=self.horizontal_global_attention)
        return _frozen(rows)


@dataclass(eq=False)
class BigBirdSparsityConfig(SparsityConfig):
    """Random blocks, neighbours, and the first blocks as global blocks (BigBird, arXiv 2007.14062)."""

    num_random_blocks: int = 1
    num_sliding_window_blocks: int = 3
    num_global_blocks: int = 1
    attention: str = "bidirectional"
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(num_random_blocks=0, num_sliding_window_blocks=1, num_global_blocks=0)
        if self.is_causal and self.num_random_blocks > 1:
            raise ValueError(
                f"num_random_blocks = {self.num_random_blocks} with unidirectional attention: the first row of blocks "
                "has only one block to draw; set it to 1 or 0"
            )

    def least_blocks(self) -> int:
        return max(self.num_random_blocks, self.num_sliding_window_blocks, self.num_global_blocks)

    def rows(self, n: int, head: int = 0) -> Layout:
        """Random blocks, neighbours, and the first blocks as global blocks in both directions."""
        rows = _neighbours(n, self.num_sliding_window_blocks)
        for row, seen in enumerate(rows):
            seen.update(_draw(row + 1 if self.is_causal else n, self.num_random_blocks, self.seed, head, row))
        _add_global(rows, [(0, self.num_global_blocks)], causal=False, horizontal=True)
        return _frozen(rows, causal=self.is_causal)


@dataclass(eq=False)
class BSLongformerSparsityConfig(SparsityConfig):
    """Neighbours and listed global blocks (block-sparse Longformer, arXiv 2004.05150)."""

    num_sliding_window_blocks: int = 3
    global_block_indices: Sequence[int] = (0,)
    global_block_end_indices: Sequence[int] | None = None
    attention: str = "bidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(num_sliding_window_blocks=1)
        self.global_block_indices = list(self.global_block_indices)
        self._spans = _spans(self.global_block_indices, self.global_block_end_indices)

    def least_blocks(self) -> int:
        return self.num_sliding_window_blocks

    def rows(self, n: int, head: int = 0) -> Layout:
        """Neighbours, and the listed blocks as global blocks in both directions."""
        rows = _neighbours(n, self.num_sliding_window_blocks)
        _add_global(rows, _clipped(self._spans, n), causal=False, horizontal=True)
        return _frozen(rows, causal=self.is_causal)


@dataclass(eq=False)
class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """Neighbours only."""

    different_layout_per_head: bool = field(default=False, init=False)
    num_sliding_window_blocks: int = 3
    attention: str = "unidirectional"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(num_sliding_window_blocks=1)

    def least_blocks(self) -> int:
        return self.num_sliding_window_blocks

    def rows(self, n: int, head: int = 0) -> Layout:
        """Neighbours; an even number of them is treated as the next odd number."""
        return _frozen(_neighbours(n, self.num_sliding_window_blocks), causal=self.is_causal)


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} = {value!r} must be a whole number of at least {least}")


def _spans(starts: Sequence[int], ends: Sequence[int] | None) -> list[Span]:
    for start in starts:
        _at_least("global_block_indices", start, 0)
    if ends is None:
        return [(start, start + 1) for start in starts]
    if len(ends) != len(starts):
        raise ValueError(
            f"global_block_end_indices has {len(ends)} entries, but global_block_indices {len(starts)}: give one end "
            "for every index"
        )
    for start, end in zip(starts, ends):
        _at_least("global_block_end_indices", end, 0)
        if start >= end:
            raise ValueError(
                f"global_block_indices {start} must be less than its global_block_end_indices {end} (which is "
                "exclusive)"
            )
    return list(zip(starts, ends))
