"""Layouts of sparse attention: worked examples, a slow definition of every pattern cell by cell, invalid settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.extras.sparse_attention.gathered import make_plan
from hf_zero.extras.sparse_attention.sparsity import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

N = 8
Rows = list[list[int]]


def rows_of(config: SparsityConfig, head: int = 0, n: int = N) -> Rows:
    return [row.nonzero().flatten().tolist() for row in config.make_layout(n * config.block)[head]]


def four(first: list[int], second: list[int]) -> Rows:
    return [first] * 4 + [second] * 4


FIRST = [0, 1, 2, 3]
LAST = [4, 5, 6, 7]
WORKED: dict[str, tuple[SparsityConfig, int, Rows]] = {
    "fixed": (FixedSparsityConfig(1), 0, four([0, 1, 2, 3, 7], [3, 4, 5, 6, 7])),
    "fixed unidirectional": (
        FixedSparsityConfig(1, attention="unidirectional"),
        0,
        [[0], [0, 1], [0, 1, 2], FIRST, [3, 4], [3, 4, 5], [3, 4, 5, 6], [3, 4, 5, 6, 7]],
    ),
    "fixed horizontal": (
        FixedSparsityConfig(1, horizontal_global_attention=True),
        0,
        [*[[0, 1, 2, 3, 7]] * 3, list(range(8)), *[[3, 4, 5, 6, 7]] * 3, list(range(8))],
    ),
    "fixed, two global blocks, head 0": (
        FixedSparsityConfig(2, 16, True, num_global_blocks=2, num_different_global_patterns=2),
        0,
        four([0, 1, 2, 3, 6, 7], [2, 3, 4, 5, 6, 7]),
    ),
    "fixed, two global blocks, head 1": (
        FixedSparsityConfig(2, 16, True, num_global_blocks=2, num_different_global_patterns=2),
        1,
        four([0, 1, 2, 3, 4, 5], [0, 1, 4, 5, 6, 7]),
    ),
    "variable": (VariableSparsityConfig(1), 0, four(FIRST, [0, 4, 5, 6, 7])),
    "variable, two windows": (
        VariableSparsityConfig(1, local_window_blocks=[1, 2], global_block_indices=[0, 5], attention="unidirectional"),
        0,
        [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [0, 5], [0, 5, 6], [0, 5, 7]],
    ),
    "longformer": (
        BSLongformerSparsityConfig(1),
        0,
        [list(range(8)), [0, 1, 2], [0, 1, 2, 3], [0, 2, 3, 4], [0, 3, 4, 5], [0, 4, 5, 6], [0, 5, 6, 7], [0, 6, 7]],
    ),
    "longformer unidirectional": (
        BSLongformerSparsityConfig(1, attention="unidirectional"),
        0,
        [[0], [0, 1], [0, 1, 2], [0, 2, 3], [0, 3, 4], [0, 4, 5], [0, 5, 6], [0, 6, 7]],
    ),
    "window": (LocalSlidingWindowSparsityConfig(1), 0, [[0], *[[i - 1, i] for i in range(1, 8)]]),
    "window bidirectional": (
        LocalSlidingWindowSparsityConfig(1, attention="bidirectional"),
        0,
        [[0, 1], *[[i - 1, i, i + 1] for i in range(1, 7)], [6, 7]],
    ),
    "dense": (DenseSparsityConfig(1), 0, [list(range(8))] * 8),
}


@pytest.mark.parametrize("name", WORKED)
def test_worked_examples(name: str) -> None:
    config, head, expected = WORKED[name]
    assert rows_of(config, head) == expected


@pytest.mark.parametrize("head", range(4))
def test_patterns_per_head(head: int) -> None:
    """Full windows use a different representative per head; a short window has room for one only."""
    config = FixedSparsityConfig(4, 16, True, num_different_global_patterns=4)
    assert rows_of(config, head) == four(sorted({*FIRST, 7 - head}), sorted({3 - head, *LAST}))
    short = [*FIRST, 5] if head < 3 else [*FIRST, 4]
    assert rows_of(config, head, n=6) == [short] * 4 + [sorted({3 - head, 4, 5})] * 2


def test_densities_as_published() -> None:
    counts = {name: sum(map(len, rows_of(*entry[:2]))) for name, entry in WORKED.items()}
    assert counts["fixed"] == 40 and counts["fixed unidirectional"] == 24 and counts["fixed horizontal"] == 46
    assert counts["variable"] == 36 and counts["variable, two windows"] == 19
    assert counts["longformer"] == 34 and counts["longformer unidirectional"] == 21
    assert counts["window"] == 15 and counts["window bidirectional"] == 22


# The same patterns for one cell: may queries of block i attend to keys of block j?


def in_one_window(i: int, j: int, sizes: list[int]) -> bool:
    start, number = 0, 0
    while True:
        size = sizes[min(number, len(sizes) - 1)]
        if start <= i < start + size:
            return start <= j < start + size
        start, number = start + size, number + 1


def fixed_cell(i: int, j: int, n: int, head: int, c: FixedSparsityConfig) -> bool:
    w, g, causal = c.num_local_blocks, c.num_global_blocks, c.attention == "unidirectional"
    if i // w == j // w and (j <= i or not causal):
        return True
    pattern = head % c.num_different_global_patterns
    for window in range(-(-n // w)):
        first = window * w + w - (1 + pattern) * g
        if (window + 1) * w > n:
            first = min(first, n - g)
        block = range(first, first + g)
        if j in block and (i >= first or not causal):
            return True
        if i in block and c.horizontal_global_attention:
            return True
    return False


def is_global(i: int, starts: list[int], ends: list[int] | None) -> bool:
    return any(start <= i < end for start, end in zip(starts, ends or [start + 1 for start in starts]))


def variable_cell(i: int, j: int, n: int, head: int, c: VariableSparsityConfig) -> bool:
    causal = c.attention == "unidirectional"
    if in_one_window(i, j, c.local_window_blocks) and (j <= i or not causal):
        return True
    for start, end in zip(
        c.global_block_indices, c.global_block_end_indices or [s + 1 for s in c.global_block_indices]
    ):
        if start <= j < end and (i >= start or not causal):
            return True
        if start <= i < end and c.horizontal_global_attention:
            return True
    return False


def longformer_cell(i: int, j: int, n: int, head: int, c: BSLongformerSparsityConfig) -> bool:
    near = abs(i - j) <= c.num_sliding_window_blocks // 2
    ends = c.global_block_end_indices
    seen = near or is_global(i, c.global_block_indices, ends) or is_global(j, c.global_block_indices, ends)
    return seen and (j <= i or c.attention == "bidirectional")


def bigbird_cell(i: int, j: int, n: int, head: int, c: BigBirdSparsityConfig) -> bool:
    near = abs(i - j) <= c.num_sliding_window_blocks // 2
    return (near or min(i, j) < c.num_global_blocks) and (j <= i or c.attention == "bidirectional")


def window_cell(i: int, j: int, n: int, head: int, c: LocalSlidingWindowSparsityConfig) -> bool:
    reach = c.num_sliding_window_blocks // 2
    return i - reach <= j <= (i if c.attention == "unidirectional" else i + reach)


direction = st.sampled_from(["unidirectional", "bidirectional"])
small = st.integers(1, 5)


@st.composite
def fixed_configs(draw: Callable[..., Any]) -> FixedSparsityConfig:
    g, times = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    patterns, word = draw(st.integers(1, times)), draw(direction)
    return FixedSparsityConfig(
        draw(small),
        draw(small),
        patterns > 1 or draw(st.booleans()),
        g * times,
        g,
        word,
        word == "bidirectional" and draw(st.booleans()),
        patterns,
    )


@st.composite
def spans(draw: Callable[..., Any]) -> tuple[list[int], list[int] | None]:
    starts = draw(st.lists(st.integers(0, 12), max_size=3))
    ends = [start + draw(st.integers(1, 4)) for start in starts]
    return starts, ends if draw(st.booleans()) else None


@st.composite
def other_configs(draw: Callable[..., Any]) -> tuple[SparsityConfig, Callable[..., bool]]:
    word, (starts, ends) = draw(direction), draw(spans())
    kind = draw(st.sampled_from(["variable", "longformer", "bigbird", "window"]))
    heads, block, per_head, sliding = draw(small), draw(small), draw(st.booleans()), draw(small)
    if kind == "variable":
        sizes, horizontal = draw(st.lists(small, min_size=1, max_size=3)), draw(st.booleans())
        across = horizontal and word == "bidirectional"
        return VariableSparsityConfig(heads, block, per_head, 0, sizes, starts, ends, word, across), variable_cell
    if kind == "longformer":
        return BSLongformerSparsityConfig(heads, block, per_head, sliding, starts, ends, word), longformer_cell
    if kind == "bigbird":
        return BigBirdSparsityConfig(heads, block, per_head, 0, sliding, draw(st.integers(0, 3)), word), bigbird_cell
    return LocalSlidingWindowSparsityConfig(heads, block, sliding, word), window_cell


configs = st.one_of(fixed_configs().map(lambda config: (config, fixed_cell)), other_configs())


@pytest.mark.lengthy
@settings(max_examples=250, deadline=None)
@given(case=configs, extra=st.integers(0, 9))
def test_layouts_are_what_the_slow_definitions_say(case: Any, extra: int) -> None:
    check_layout(case, extra)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None)
@given(case=configs, extra=st.integers(0, 9))
def test_many_layouts_are_what_the_slow_definitions_say(case: Any, extra: int) -> None:
    check_layout(case, extra)


def check_layout(case: Any, extra: int) -> None:
    config, cell = case
    n = config.least_blocks() + extra
    layout = config.make_layout(n * config.block)
    for head in {0, config.num_heads - 1}:
        number = head if config.different_layout_per_head else 0
        expected = [[int(cell(i, j, n, number, config)) for j in range(n)] for i in range(n)]
        assert layout[head].tolist() == expected


@settings(max_examples=100, deadline=None)
@given(n=st.integers(3, 12), number=st.integers(0, 3), seed=st.integers(0, 5), word=direction, big=st.booleans())
def test_random_blocks_are_added_to_the_pattern_and_follow_the_seed(
    n: int, number: int, seed: int, word: str, big: bool
) -> None:
    if big and word == "unidirectional":
        number = min(number, 1)
    options: dict[str, Any] = {"different_layout_per_head": True, "attention": word}

    def layout(random_blocks: int, seed: int) -> Any:
        kind: Any = BigBirdSparsityConfig if big else VariableSparsityConfig
        return kind(3, 1, num_random_blocks=random_blocks, seed=seed, **options).make_layout(n)

    found, plain = layout(number, seed), layout(0, seed)
    assert found.equal(layout(number, seed)) and (found >= plain).all()
    assert (found - plain).sum(-1).max() <= number
    if big and word == "unidirectional":
        assert found.equal(found.tril())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FixedSparsityConfig(2, num_local_blocks=4, num_global_blocks=3), "multiple of num_global_blocks = 3"),
        (lambda: FixedSparsityConfig(2, num_different_global_patterns=2), "needs different_layout_per_head"),
        (
            lambda: FixedSparsityConfig(2, 16, True, 4, 2, num_different_global_patterns=3),
            "more than num_local_blocks // num_global_blocks = 2",
        ),
        (
            lambda: FixedSparsityConfig(2, attention="unidirectional", horizontal_global_attention=True),
            "horizontal_global_attention",
        ),
        (
            lambda: VariableSparsityConfig(2, global_block_indices=[1, 2], global_block_end_indices=[3]),
            "2: give one end",
        ),
        (
            lambda: BSLongformerSparsityConfig(2, global_block_indices=[3], global_block_end_indices=[3]),
            "3 must be less",
        ),
        (lambda: BigBirdSparsityConfig(2, num_random_blocks=2, attention="unidirectional"), "only one block to draw"),
        (lambda: BigBirdSparsityConfig(2, num_sliding_window_blocks=5).make_layout(64), "fewer than the pattern's 5"),
        (lambda: FixedSparsityConfig(2).make_layout(100), "multiple of block = 16"),
        (lambda: FixedSparsityConfig(0), "num_heads = 0"),
        (lambda: VariableSparsityConfig(1, local_window_blocks=[]), "at least one size"),
    ],
)
def test_settings_that_cannot_be(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_another_word_for_the_direction() -> None:
    with pytest.raises(NotImplementedError, match="attention = 'both'"):
        FixedSparsityConfig(1, attention="both")
    with pytest.raises(NotImplementedError, match="defines no pattern"):
        SparsityConfig(1).make_layout(16)


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 40), chance=st.floats(0, 1), seed=st.integers(0, 99), heads=st.integers(1, 3))
def test_a_plan_computes_every_block_once_and_few_others(n: int, chance: float, seed: int, heads: int) -> None:
    import random

    draw = random.Random(seed)
    drawn = [tuple(tuple(k for k in range(n) if draw.random() < chance) for _ in range(n)) for _ in range(heads)]
    plan = make_plan(drawn, heads, block=4)
    seen = {
        (head, row): [key for key in keys if key >= 0]
        for part in plan.parts
        for head in part.heads
        for group in part.groups
        for row, keys in zip(group.rows, group.keys)
    }
    assert seen == {(head, row): list(keys) for head in range(heads) for row, keys in enumerate(drawn[head])}
    needed = sum(max(1, len(keys)) for keys in seen.values())
    assert needed <= plan.computed_blocks <= 1.125 * needed
    assert plan.density == plan.computed_blocks / (heads * n * n)


def test_dense_layouts() -> None:
    assert DenseSparsityConfig(1).rows(3) == ((0, 1, 2),) * 3
