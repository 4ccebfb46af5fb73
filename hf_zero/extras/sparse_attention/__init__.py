"""Sparse attention: each block of queries only attends to the key blocks of a pattern.

This module defines the config section sparse_attention, its rules and its policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from hf_zero.config.errors import ABSENT, Edit, Finding, Problem, Remark
from hf_zero.config.features import Extra, OwnSection
from hf_zero.config.rules import Ranks, Several
from hf_zero.config.schema.fields import Count, Flag, Positive, Section, as_lower, supported
from hf_zero.extras.sparse_attention.sparsity import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

Mode = Annotated[
    Literal["dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window"], BeforeValidator(as_lower)
]


Direction = Annotated[Literal["unidirectional", "bidirectional"], BeforeValidator(as_lower)]


class SparseAttention(Section):
    """The blocks of keys that a block of queries attends to. An empty section has no effect."""

    mode: Mode = supported("fixed", "The pattern; local_sliding_window is not supported by DeepSpeed.")
    block: Positive = supported(16, "Block size; use 64 or more on GPUs.", unit="tokens")
    different_layout_per_head: Flag = supported(False, "Heads may have different patterns.")
    attention: Direction = supported("bidirectional", "unidirectional: blocks ignore later ones. Not for dense.")
    num_local_blocks: Positive = supported(4, "fixed: blocks per window.")
    num_global_blocks: Count = supported(1, "fixed: global blocks per window; bigbird: first blocks, which are global.")
    horizontal_global_attention: Flag = supported(False, "fixed, variable: global blocks also attend to all blocks.")
    num_different_global_patterns: Positive = supported(1, "fixed: number of different global blocks among heads.")
    num_random_blocks: Count = supported(0, "variable, bigbird: random blocks per row; deterministic.")
    local_window_blocks: list[Positive] = supported([4], "variable: window sizes; the last one repeats.")
    global_block_indices: list[Count] = supported([0], "variable, bslongformer: global blocks, or starts of ranges.")
    global_block_end_indices: list[Count] | None = supported(None, "Ends of these ranges.")
    num_sliding_window_blocks: Positive = supported(
        3, "bigbird, bslongformer, local_sliding_window: neighbouring blocks, including the block itself."
    )

    rules = (Several(every=lambda config, ranks: _findings(config, ranks)),)


PATTERNS: dict[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
    "local_sliding_window": LocalSlidingWindowSparsityConfig,
}


def pattern_keys(mode: str) -> set[str]:
    """The keys of a pattern in addition to mode, block and different_layout_per_head."""
    return {field.name for field in fields(PATTERNS[mode])} & set(SparseAttention.model_fields) - _COMMON


_COMMON = frozenset(("mode", "block", "different_layout_per_head"))


def _findings(config: Any, ranks: Ranks) -> Iterator[Finding]:
    section: SparseAttention = config.section(SparseAttention)
    for name in sorted(section.model_fields_set - pattern_keys(section.mode) - _COMMON):
        text, path = f"no effect with mode {section.mode}", ("sparse_attention", name)
        yield Remark(".".join(path), text, getattr(section, name), edit=Edit(path))
    if section.model_fields_set:
        yield from _pattern_problems(section)


def _policy(config: Any) -> SparseAttention | None:
    """An empty section has no policy."""
    section: SparseAttention = config.section(SparseAttention)
    return section if section.model_fields_set else None


def _pattern_problems(section: SparseAttention) -> Iterator[Problem]:
    read = pattern_keys(section.mode)

    def problem(name: str, rule: str, fix: str, edit: tuple[str, object] | None = None) -> Problem:
        change = None if edit is None else Edit(("sparse_attention", edit[0]), value=edit[1])
        return Problem(f"sparse_attention.{name}", getattr(section, name), rule, fix, edit=change)

    causal = section.attention == "unidirectional"
    if section.mode == "fixed":
        g, w, patterns = section.num_global_blocks, section.num_local_blocks, section.num_different_global_patterns
        if not g or w % g:
            yield problem("num_global_blocks", f"must divide num_local_blocks = {w}", "1 always does")
        elif patterns > w // g:
            yield problem(
                "num_different_global_patterns",
                f"a window of {w} blocks only has {w // g} choices of {g} global blocks",
                f"set at most {w // g}",
            )
        if patterns > 1 and not section.different_layout_per_head:
            rule = "heads can only differ with different_layout_per_head"
            fix, edit = "set different_layout_per_head to true, or this to 1", ("different_layout_per_head", True)
            yield problem("num_different_global_patterns", rule, fix, edit)
    if "horizontal_global_attention" in read and section.horizontal_global_attention and causal:
        rule = "makes blocks attend to later ones, which unidirectional attention forbids"
        fix, edit = "set it to false, or attention to bidirectional", ("horizontal_global_attention", False)
        yield problem("horizontal_global_attention", rule, fix, edit)
    if "local_window_blocks" in read and not section.local_window_blocks:
        rule = "must list at least one size"
        yield problem("local_window_blocks", rule, "remove it for [4]", ("local_window_blocks", ABSENT))
    if section.mode == "bigbird" and causal and section.num_random_blocks > 1:
        rule = "with unidirectional attention, the first row of blocks has only one block to draw"
        yield problem("num_random_blocks", rule, "set it to 1 or 0, or attention to bidirectional")
    if "global_block_indices" in read and section.global_block_end_indices is not None:
        starts, ends = section.global_block_indices, section.global_block_end_indices
        if len(starts) != len(ends):
            rule = f"must have one entry for each of the {len(starts)} global_block_indices"
            yield problem("global_block_end_indices", rule, "remove it, or complete it")
        elif any(start >= end for start, end in zip(starts, ends)):
            rule = f"every end must be more than its start in global_block_indices = {starts}"
            yield problem("global_block_end_indices", rule, "ends are exclusive: start + 1 is one block")


EXTRA = Extra(
    name="sparse_attention",
    sections=(
        OwnSection(path="sparse_attention", kind=SparseAttention, doc="Sparse attention (docs/sparse_attention.md)."),
    ),
    policy=_policy,
    features=("hf_zero.extras.sparse_attention.registered:sparse_attention_of",),
)
