"""Which blocks of keys a block of queries sees: pure functions from integers to rows of integers.

A layout is one tuple per block of queries: the key blocks it sees, ascending. n is the number of blocks, and a head
has a number where heads may differ. Patterns are DeepSpeed's (deepspeed.ops.sparse_attention, up to 0.19.6); those
with chance in them are functions of a seed here.

    fixed, n = 8, windows of 4, one global block       row 0..3   # # # # . . . #
                                                       row 4..7   . . . # # # # #
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

Layout = tuple[tuple[int, ...], ...]
Span = tuple[int, int]  # [first, last) of a run of blocks


def dense(n: int) -> Layout:
    """Everything sees everything."""
    return (tuple(range(n)),) * n


def fixed(
    n: int,
    *,
    head: int = 0,
    num_local: int = 4,
    num_global: int = 1,
    num_patterns: int = 1,
    causal: bool = False,
    horizontal: bool = False,
) -> Layout:
    """Windows of `num_local` blocks, and the last blocks of every window as representatives that all later windows (or
    all windows) see; head h takes them `h mod num_patterns` places further to the front."""
    back = num_local - (1 + head % num_patterns) * num_global
    spans = [(start + back, start + back + num_global) for start in range(0, n - num_local + 1, num_local)]
    rest = n % num_local
    if rest:  # a short window at the end has its representatives inside, as far as there is room
        first = max(0, min(n - rest + back, n - num_global))
        spans.append((first, first + num_global))
    rows = _windows(n, [num_local], causal=causal)
    _add_global(rows, spans, causal=causal, horizontal=horizontal)
    return _frozen(rows)


def variable(
    n: int,
    *,
    head: int = 0,
    num_random: int = 0,
    windows: Sequence[int] = (4,),
    global_spans: Iterable[Span] = ((0, 1),),
    causal: bool = False,
    horizontal: bool = False,
    seed: int = 0,
) -> Layout:
    """Windows of the sizes listed, the last size repeating; random blocks in every row, also of later keys."""
    rows = _windows(n, windows, causal=causal)
    for row, seen in enumerate(rows):
        seen.update(_draw(n, num_random, seed, head, row))
    _add_global(rows, _clipped(global_spans, n), causal=causal, horizontal=horizontal)
    return _frozen(rows)


def bigbird(
    n: int,
    *,
    head: int = 0,
    num_random: int = 1,
    num_sliding: int = 3,
    num_global: int = 1,
    causal: bool = False,
    seed: int = 0,
) -> Layout:
    """Random blocks, neighbours, and the first blocks seen by all and seeing all."""
    rows = _neighbours(n, num_sliding)
    for row, seen in enumerate(rows):
        seen.update(_draw(row + 1 if causal else n, num_random, seed, head, row))
    _add_global(rows, [(0, num_global)], causal=False, horizontal=True)
    return _frozen(rows, causal=causal)


def longformer(
    n: int, *, num_sliding: int = 3, global_spans: Iterable[Span] = ((0, 1),), causal: bool = False
) -> Layout:
    """Neighbours, and the listed blocks seen by all and seeing all."""
    rows = _neighbours(n, num_sliding)
    _add_global(rows, _clipped(global_spans, n), causal=False, horizontal=True)
    return _frozen(rows, causal=causal)


def sliding_window(n: int, *, num_sliding: int = 3, causal: bool = True) -> Layout:
    """Neighbours alone; an even number of them acts as the next odd one."""
    return _frozen(_neighbours(n, num_sliding), causal=causal)


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
