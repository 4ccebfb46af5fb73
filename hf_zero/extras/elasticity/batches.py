"""Elastic batch sizes: one batch that goes with as many numbers of ranks as possible. Pure integers.

A batch B goes with w ranks when some micro-batch m divides B and w divides B / m. DeepSpeed's choice (versions 0.1 and
0.2 of its elasticity) among few candidates: a micro-batch, or the least common multiple of all, times a highly
composite number. 0.2 counts in nodes of g ranks, and keeps a job of any size going with a batch of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Numbers with more divisors than every smaller one.
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRule:
    """The section, checked.

    Attributes:
        max_batch: samples per update at most.
        by_nodes: ranks come and go `per_node` at a time (version 0.2).
        model_ranks: ranks that share one model.
    """

    max_batch: int
    micro_batches: tuple[int, ...]
    min_ranks: int = 1
    max_ranks: int = 10000
    prefers_larger: bool = True
    by_nodes: bool = True
    per_node: int = 1
    model_ranks: int = 1


@dataclass(frozen=True, slots=True)
class ElasticBatch:
    """The batch of a job.

    Attributes:
        batch: samples per update.
        counts: numbers of data-parallel ranks that it goes with, ascending.
        micro: samples per forward at the number of ranks asked about; None where that was none.
    """

    batch: int
    counts: tuple[int, ...]
    micro: int | None = None


class ElasticProblem(ValueError):
    """The rule has no batch; `key` of the section is what to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def elastic_batch(rule: ElasticRule, ranks: int | None = None) -> ElasticBatch:
    """The batch of a job, and the micro-batch of `ranks` data-parallel ranks times `rule.model_ranks`.

    Raises:
        ElasticProblem: there is none.
    """
    if max(rule.micro_batches) > rule.max_batch:
        raise ElasticProblem(
            "micro_batch_sizes",
            f"{max(rule.micro_batches)} is more than max_train_batch_size = {rule.max_batch}",
        )
    if not rule.by_nodes:
        found = _best(rule, rule.max_batch, rule.min_ranks, rule.max_ranks)
        return found if ranks is None else ElasticBatch(found.batch, found.counts, _micro(rule, found, ranks))
    if rule.per_node % rule.model_ranks:
        raise ElasticProblem(
            "model_parallel_size", f"num_gpus_per_node = {rule.per_node} is not a multiple of {rule.model_ranks}"
        )
    return _by_nodes(rule, ranks)


def _by_nodes(rule: ElasticRule, ranks: int | None) -> ElasticBatch:
    data_ranks = rule.per_node // rule.model_ranks  # of one node
    of_node = rule.max_batch // data_ranks
    if max(rule.micro_batches) > of_node:
        raise ElasticProblem(
            "micro_batch_sizes",
            f"{max(rule.micro_batches)} on each of a node's {data_ranks} data-parallel ranks is more than "
            f"max_train_batch_size = {rule.max_batch}",
        )
    nodes = _best(rule, of_node, rule.min_ranks // rule.per_node, rule.max_ranks // rule.per_node)
    found = ElasticBatch(nodes.batch * data_ranks, tuple(count * data_ranks for count in nodes.counts))
    if ranks is None:
        return found
    mine = ranks // rule.model_ranks
    if mine in found.counts:
        return ElasticBatch(found.batch, found.counts, _micro(rule, found, mine))
    # A job of another size keeps going with the batch nearest to the largest that its own number divides.
    mine = ranks * data_ranks // rule.per_node
    batches = [rule.max_batch // (micro * mine) * micro * mine for micro in rule.micro_batches] if mine else [0]
    batch = max(batches) if rule.prefers_larger else min(batches)
    if not batch:
        raise ElasticProblem(
            "max_train_batch_size", f"{ranks} ranks need more than {rule.max_batch} samples, one micro-batch each"
        )
    own = ElasticBatch(batch, (mine,))
    return ElasticBatch(batch, own.counts, _micro(rule, own, mine))


def _best(rule: ElasticRule, max_batch: int, min_count: int, max_count: int) -> ElasticBatch:
    micros, least = rule.micro_batches, min(rule.micro_batches)
    low, high = min_count or 1, max_count or max_batch // least
    bases = [*micros, math.lcm(*micros)]
    # Among equals the order of the candidates decides nothing: a larger (smaller) batch always replaces.
    best, counts = least, tuple[int, ...]()
    for batch in sorted({_grown(base, max_batch) for base in bases if base <= max_batch}):
        found = valid_counts(batch, micros, low, high)
        better = batch > best if rule.prefers_larger else batch < best
        if len(found) > len(counts) or (len(found) == len(counts) and better):
            best, counts = batch, found
    return ElasticBatch(best, counts)


def _grown(base: int, max_batch: int) -> int:
    """`base` times the largest highly composite number that fits."""
    return base * max(number for number in _HIGHLY_COMPOSITE if number <= max_batch // base)


def valid_counts(batch: int, micros: Iterable[int], low: int, high: int) -> tuple[int, ...]:
    """All numbers of ranks from `low` to `high` that a batch can be spread over evenly, in micro-batches."""
    found: set[int] = set()
    for micro in micros:
        if batch % micro == 0:
            found |= _divisors(batch // micro)
    return tuple(sorted(count for count in found if low <= count <= high))


def _divisors(number: int) -> set[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return {*small, *(number // divisor for divisor in small)}


def _micro(rule: ElasticRule, found: ElasticBatch, count: int) -> int:
    """The largest micro-batch for one of the valid numbers of ranks."""
    if count not in found.counts:
        raise ElasticProblem(
            "elasticity",
            f"{count} ranks do not go with the batch of {found.batch}; these numbers do: {_shown(found.counts)}",
        )
    fitting = [micro for micro in rule.micro_batches if found.batch // count % micro == 0]
    return max(fitting)


def _shown(counts: Sequence[int]) -> str:
    text = ", ".join(map(str, counts[:20])) or "none from min_gpus to max_gpus"
    return text if len(counts) <= 20 else f"{text}, ... ({len(counts)} of them)"
