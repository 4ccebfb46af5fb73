"""DeepSpeed's SparsityConfig classes: settings of a pattern, checked, and the layout that follows from them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_zero.extras.sparse_attention import layouts
from hf_zero.extras.sparse_attention.layouts import Layout, Span

_WORDS = ("unidirectional", "bidirectional")


class SparsityConfig:
    """What all patterns have in common.

    Args:
        num_heads: heads of the queries.
        block: tokens per block, on either side.
        different_layout_per_head: False: all heads have that of head 0.

    Raises:
        ValueError: for a setting outside its range; NotImplementedError for another word than the two of `attention`.
    """

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        _at_least("num_heads", num_heads, 1)
        _at_least("block", block, 1)
        self.num_heads = num_heads
        self.block = block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def rows(self, num_blocks: int, head: int = 0) -> Layout:
        """The layout of one head, as integers."""
        raise NotImplementedError(
            f"{type(self).__name__} says nothing about which blocks are seen: take FixedSparsityConfig or another one"
        )

    def least_blocks(self) -> int:
        """Fewer blocks than this the pattern does not fit into."""
        return 1

    def head_rows(self, num_blocks: int) -> list[Layout]:
        """One layout, or one per head. A sequence too short for the pattern gets the corner of the shortest that fits.

        Unlike `make_layout` this is for sequences of any length.
        """
        whole = max(num_blocks, self.least_blocks())
        found = [self.rows(whole, head) for head in range(self.num_layout_heads)]
        if whole == num_blocks:
            return found
        return [tuple(tuple(k for k in row if k < num_blocks) for row in rows[:num_blocks]) for rows in found]

    def make_layout(self, seq_len: int) -> Tensor:
        """int64 [num_heads, seq_len / block, seq_len / block]: 1 where a block of keys is seen."""
        layout = self.setup_layout(seq_len)
        num_blocks = layout.shape[1]
        if num_blocks < self.least_blocks():
            raise ValueError(
                f"{type(self).__name__}.make_layout({seq_len}): {num_blocks} blocks of {self.block} are fewer than the "
                f"pattern's {self.least_blocks()}; take longer sequences, smaller blocks or a smaller pattern"
            )
        for head in range(self.num_layout_heads):
            for row, seen in enumerate(self.rows(num_blocks, head)):
                layout[head, row, list(seen)] = 1
        return self.check_and_propagate_first_head_layout(layout)

    def setup_layout(self, seq_len: int) -> Tensor:
        """Zeros of the layout's shape."""
        if seq_len < self.block or seq_len % self.block:
            raise ValueError(
                f"make_layout({seq_len}): the length must be a positive multiple of block = {self.block}; pad the "
                "sequence (SparseAttentionUtils.pad_to_block_size)"
            )
        num_blocks = seq_len // self.block
        return torch.zeros((self.num_heads, num_blocks, num_blocks), dtype=torch.int64)

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Every head like the first, unless they differ."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout


class DenseSparsityConfig(SparsityConfig):
    """Nothing is left out."""

    def rows(self, num_blocks: int, head: int = 0) -> Layout:
        return layouts.dense(num_blocks)


class FixedSparsityConfig(SparsityConfig):
    """Windows, and representatives of each that others see (Sparse Transformer, arXiv 1904.10509)."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _at_least("num_local_blocks", num_local_blocks, 1)
        _at_least("num_global_blocks", num_global_blocks, 1)
        _at_least("num_different_global_patterns", num_different_global_patterns, 1)
        if num_local_blocks % num_global_blocks:
            raise ValueError(
                f"num_local_blocks = {num_local_blocks} must be a multiple of num_global_blocks = {num_global_blocks}"
            )
        _check_direction(attention, horizontal_global_attention)
        if num_different_global_patterns > 1 and not different_layout_per_head:
            raise ValueError(
                f"num_different_global_patterns = {num_different_global_patterns} needs different_layout_per_head"
            )
        most = num_local_blocks // num_global_blocks
        if num_different_global_patterns > most:
            raise ValueError(
                f"num_different_global_patterns = {num_different_global_patterns} is more than num_local_blocks // "
                f"num_global_blocks = {most}"
            )
        self.num_local_blocks = num_local_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = attention
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns

    def least_blocks(self) -> int:
        return self.num_global_blocks

    def rows(self, num_blocks: int, head: int = 0) -> Layout:
        return layouts.fixed(
            num_blocks,
            head=head,
            num_local=self.num_local_blocks,
            num_global=self.num_global_blocks,
            num_patterns=self.num_different_global_patterns,
            causal=self.attention == "unidirectional",
            horizontal=self.horizontal_global_attention,
        )


class VariableSparsityConfig(SparsityConfig):
    """Windows of several sizes, listed global blocks, random ones."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _at_least("num_random_blocks", num_random_blocks, 0)
        if not local_window_blocks:
            raise ValueError("local_window_blocks must list at least one size")
        for size in local_window_blocks:
            _at_least("local_window_blocks", size, 1)
        _check_direction(attention, horizontal_global_attention)
        self.num_random_blocks = num_random_blocks
        self.local_window_blocks = list(local_window_blocks)
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = None if global_block_end_indices is None else list(global_block_end_indices)
        self.attention = attention
        self.horizontal_global_attention = horizontal_global_attention
        self.seed = seed
        self._spans = _spans(self.global_block_indices, self.global_block_end_indices)

    def least_blocks(self) -> int:
        return max(1, self.num_random_blocks)

    def rows(self, num_blocks: int, head: int = 0) -> Layout:
        return layouts.variable(
            num_blocks,
            head=head,
            num_random=self.num_random_blocks,
            windows=self.local_window_blocks,
            global_spans=self._spans,
            causal=self.attention == "unidirectional",
            horizontal=self.horizontal_global_attention,
            seed=self.seed,
        )


class BigBirdSparsityConfig(SparsityConfig):
    """Random blocks, neighbours, and the first blocks for all (arXiv 2007.14062)."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _at_least("num_random_blocks", num_random_blocks, 0)
        _at_least("num_sliding_window_blocks", num_sliding_window_blocks, 1)
        _at_least("num_global_blocks", num_global_blocks, 0)
        _check_direction(attention)
        if attention == "unidirectional" and num_random_blocks > 1:
            raise ValueError(
                f"num_random_blocks = {num_random_blocks} with unidirectional attention: the first row of blocks has "
                "one block to draw from; take 1 or 0"
            )
        self.num_random_blocks = num_random_blocks
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.num_global_blocks = num_global_blocks
        self.attention = attention
        self.seed = seed

    def least_blocks(self) -> int:
        return max(self.num_random_blocks, self.num_sliding_window_blocks, self.num_global_blocks)

    def rows(self, num_blocks: int, head: int = 0) -> Layout:
        return layouts.bigbird(
            num_blocks,
            head=head,
            num_random=self.num_random_blocks,
            num_sliding=self.num_sliding_window_blocks,
            num_global=self.num_global_blocks,
            causal=self.attention == "unidirectional",
            seed=self.seed,
        )


class BSLongformerSparsityConfig(SparsityConfig):
    """Neighbours and listed global blocks, in blocks (Longformer, arXiv 2004.05150)."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _at_least("num_sliding_window_blocks", num_sliding_window_blocks, 1)
        _check_direction(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.global_block_indices = list(global_block_indices)
        self.global_block_end_indices = None if global_block_end_indices is None else list(global_block_end_indices)
        self.attention = attention
        self._spans = _spans(self.global_block_indices, self.global_block_end_indices)

    def least_blocks(self) -> int:
        return self.num_sliding_window_blocks

    def rows(self, num_blocks: int, head: int = 0) -> Layout:
        return layouts.longformer(
            num_blocks,
            num_sliding=self.num_sliding_window_blocks,
            global_spans=self._spans,
            causal=self.attention == "unidirectional",
        )


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """Neighbours alone."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: str = "unidirectional",
    ) -> None:
        super().__init__(num_heads, block)
        _at_least("num_sliding_window_blocks", num_sliding_window_blocks, 1)
        _check_direction(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.attention = attention

    def least_blocks(self) -> int:
        return self.num_sliding_window_blocks

    def rows(self, num_blocks: int, head: int = 0) -> Layout:
        return layouts.sliding_window(
            num_blocks, num_sliding=self.num_sliding_window_blocks, causal=self.attention == "unidirectional"
        )


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} = {value!r} must be a whole number of at least {least}")


def _check_direction(attention: str, horizontal: bool = False) -> None:
    if attention not in _WORDS:
        raise NotImplementedError(f'attention = {attention!r} must be "unidirectional" or "bidirectional"')
    if horizontal and attention == "unidirectional":
        raise ValueError(
            "horizontal_global_attention lets blocks see later ones, which unidirectional attention does not; switch "
            "one of them"
        )


def _spans(starts: Sequence[int], ends: Sequence[int] | None) -> list[Span]:
    for start in starts:
        _at_least("global_block_indices", start, 0)
    if ends is None:
        return [(start, start + 1) for start in starts]
    if len(ends) != len(starts):
        raise ValueError(
            f"global_block_end_indices has {len(ends)} entries and global_block_indices {len(starts)}: give one end "
            "for every index"
        )
    for start, end in zip(starts, ends):
        _at_least("global_block_end_indices", end, 0)
        if start >= end:
            raise ValueError(
                f"global_block_indices {start} must be less than its global_block_end_indices {end} (which is "
                "not included)"
            )
    return list(zip(starts, ends))
