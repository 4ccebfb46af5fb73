"""What a model's own mask allows, as a function that is asked at positions: no tensor of tokens times tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_zero.extras.sparse_attention import flex
from hf_zero.extras.sparse_attention.layouts import Layout
from hf_zero.extras.sparse_attention.plan import BlockPlan, make_plan
from hf_zero.extras.sparse_attention.sparsity import SparsityConfig

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""(numbers of sample, head, query and key) -> whether the query may see the key; takes tensors that broadcast."""

_AT_ONCE = 1 << 24  # positions that are asked about in one go
_plan = functools.lru_cache(maxsize=32)(make_plan)


def causal(_sample: Any, _head: Any, query: Any, key: Any) -> Any:
    """No token sees a later one."""
    return key <= query


class SparseMask:
    """The mask of one forward. Layers with the same pattern share what is worked out for it."""

    def __init__(self, function: MaskFunction | None, batch: int, length: int, device: torch.device) -> None:
        """`function` None: every token may see every other."""
        self.function = function
        self.batch = batch
        self.length = length
        self.device = device
        self._layouts: dict[int, tuple[SparsityConfig, tuple[Layout, ...]]] = {}
        self._flex: dict[int, Any] = {}
        self._plans: dict[int, BlockPlan] = {}
        self.kept: dict[int, Tensor | None] = {}  # masks of groups of rows, for all layers of one pattern

    def plan(self, sparsity: SparsityConfig, num_heads: int) -> BlockPlan:
        """What `gathered_attention` computes for a pattern."""
        layouts = self.layouts(sparsity, num_heads)
        return self._plans.setdefault(id(sparsity), _plan(layouts, num_heads, sparsity.block))

    def flex(self, sparsity: SparsityConfig, num_heads: int) -> Any:
        """The BlockMask of a pattern."""
        layouts = self.layouts(sparsity, num_heads)
        if id(sparsity) not in self._flex:
            shape = (self.batch, self.length)
            self._flex[id(sparsity)] = flex.block_mask(layouts, sparsity.block, shape, self.function, self.device)
        return self._flex[id(sparsity)]

    def layouts(self, sparsity: SparsityConfig, num_heads: int) -> tuple[Layout, ...]:
        """The pattern without blocks of later keys that no query in them may see."""
        known = self._layouts.get(id(sparsity))
        if known is None:
            if sparsity.different_layout_per_head and sparsity.num_heads != num_heads:
                raise ValueError(
                    f"the layouts are for {sparsity.num_heads} heads, and the model has {num_heads} heads of "
                    "queries: set num_heads, or switch different_layout_per_head off"
                )
            found = sparsity.head_rows(-(-self.length // sparsity.block))
            trimmed = tuple(self._trimmed(layout, sparsity.block) for layout in dict.fromkeys(found))
            by_layout = dict(zip(dict.fromkeys(found), trimmed))
            known = self._layouts[id(sparsity)] = (sparsity, tuple(by_layout[layout] for layout in found))
        return known[1]

    def allowed(self, queries: Tensor, keys: Tensor, _heads: tuple[int, ...] = ()) -> Tensor:
        """At positions of queries [R, q, 1] and keys [R, 1, k]: bool [B or 1, 1, R, q, k]."""
        if self.function is None:
            return torch.ones((1, 1, 1, 1, 1), dtype=torch.bool, device=self.device)
        samples = torch.arange(self.batch, device=self.device).view(-1, 1, 1, 1, 1)
        head = torch.zeros((1, 1, 1, 1, 1), dtype=torch.long, device=self.device)
        answer: Tensor = self.function(samples, head, queries[None, None], keys[None, None])
        return answer

    def dense(self) -> Tensor:
        """The model's mask without any pattern: bool [B or 1, 1, S, S]."""
        positions = torch.arange(self.length, device=self.device)
        answer = self.allowed(positions.view(1, -1, 1), positions.view(1, 1, -1))[:, :, 0]
        return answer.expand(answer.shape[0], 1, self.length, self.length)

    def _trimmed(self, layout: Layout, block: int) -> Layout:
        later = [(row, key) for row, seen in enumerate(layout) for key in seen if key > row]
        if self.function is None or not later:
            return layout
        return _without(layout, {pair for pair, is_used in zip(later, self._used(later, block)) if not is_used})

    def _used(self, pairs: list[tuple[int, int]], block: int) -> list[bool]:
        """For each (block of queries, block of keys) whether any of the first may see any of the second."""
        offsets = torch.arange(block, device=self.device)
        used: list[bool] = []
        step = max(1, _AT_ONCE // (block * block * self.batch))
        for start in range(0, len(pairs), step):
            some = torch.tensor(pairs[start : start + step], device=self.device)
            queries, keys = ((some[:, side, None] * block + offsets).clamp(max=self.length - 1) for side in (0, 1))
            used += (
                self.allowed(queries[:, :, None], keys[:, None, :])
                .expand(-1, -1, len(some), block, block)
                .any(dim=(0, 1, 3, 4))
                .tolist()
            )
        return used


def _without(layout: Layout, pairs: set[tuple[int, int]]) -> Layout:
    return tuple(tuple(key for key in seen if (row, key) not in pairs) for row, seen in enumerate(layout))
