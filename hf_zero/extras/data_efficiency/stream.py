"""Which samples every update sees: a pure function of the settings, the data and the update's number.

At every update the difficulties may admit more samples; those newly admitted make up a *cluster*. A batch takes from
each cluster in proportion to its size; a cluster is passed through in an order drawn anew each time it is exhausted.
What is drawn depends on (seed, update) and (seed, cluster, pass) alone, so that a stream resumes exactly at any update,
and no number of ranks or workers changes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hf_zero.extras.data_efficiency.difficulty import Custom, Difficulty
from hf_zero.extras.data_efficiency.indexed import IndexedRows
from hf_zero.extras.data_efficiency.policy import MetricPolicy, SamplingPolicy

Ids = NDArray[np.int64]
_OF_UPDATE, _OF_CLUSTER = 1, 2


class Admission:
    """Which samples a metric admits at a difficulty, by the analyzer's files."""

    def __init__(self, metric: MetricPolicy, num_samples: int) -> None:
        self.metric = metric
        rows = IndexedRows(metric.index_to_sample)
        self._samples: Ids = rows.flat().astype(np.int64)  # easiest first
        self._ends: Ids = np.cumsum(rows.lengths, dtype=np.int64)
        self._values: Ids | None = None
        if len(self._samples) and not 0 <= self._samples.min() <= self._samples.max() < num_samples:
            raise ValueError(
                f"{metric.index_to_sample}: names sample {self._samples.max()}, and the data set has {num_samples}: "
                "analyse this data set (DataAnalyzer)"
            )
        if not metric.by_percentile:
            self._values = IndexedRows(metric.index_to_metric).flat().astype(np.int64)
            if len(self._values) != len(self._ends):
                raise ValueError(f"{metric.index_to_metric} and {metric.index_to_sample} are not of one analysis")

    def samples(self, difficulty: int) -> Ids:
        """All samples that are easy enough, easiest first."""
        if self._values is not None:
            row = int(np.searchsorted(self._values, difficulty, side="right"))
            return self._samples[: int(self._ends[row - 1]) if row else 0]
        number, points = len(self._samples), self.metric.difficulty.maximum
        if difficulty >= points:
            return self._samples
        # Whole points of a percentile have equally many samples, the rest comes with the last.
        return self._samples[: number // points * difficulty if number >= points else number * difficulty // points]


@dataclass(slots=True)
class Cluster:
    """Samples admitted at one update, passed through again and again."""

    number: int
    samples: Ids
    seed: int
    passes: int = 0
    position: int = 0
    _order: Ids | None = field(default=None, repr=False)

    def take(self, count: int) -> Ids:
        """The next samples; none twice as long as there are enough."""
        parts: list[Ids] = []
        taken = 0
        while taken < count:
            if self._order is None:
                self._order = self._shuffled()
                if parts and count <= len(self.samples):  # those of this batch come last in the new pass
                    used = np.isin(self._order, np.concatenate(parts))
                    self._order = np.concatenate([self._order[~used], self._order[used]])
            part = self._order[self.position : self.position + count - taken]
            parts.append(part)
            taken += len(part)
            self.position += len(part)
            if self.position >= len(self.samples):
                self.passes, self.position, self._order = self.passes + 1, 0, None
        return np.concatenate(parts) if parts else self.samples[:0]

    def _shuffled(self) -> Ids:
        draw = np.random.default_rng((self.seed, _OF_CLUSTER, self.number, self.passes))
        return self.samples[draw.permutation(len(self.samples))]


class SampleStream:
    """The samples of all updates, in order.

    Args:
        num_samples: of the data set.
        batch_size: samples per update, over all ranks.

    Raises:
        ValueError: the analyzer's files are not those of this data set.
    """

    def __init__(self, policy: SamplingPolicy, num_samples: int, batch_size: int) -> None:
        self.policy = policy
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.num_updates = num_samples * policy.num_epochs // batch_size
        self.difficulties = {metric.name: Difficulty(metric.difficulty) for metric in policy.metrics}
        self._admissions = [Admission(metric, num_samples) for metric in policy.metrics if metric.chooses_samples]
        self._restart()

    def set_custom(self, functions: Mapping[str, Custom]) -> None:
        """Functions of custom schedules, by metric; the stream begins anew with them."""
        unknown = sorted(set(functions) - set(self.difficulties))
        if unknown:
            raise ValueError(f"no such metric: {', '.join(unknown)}; there are {', '.join(self.difficulties)}")
        for name, function in functions.items():
            self.difficulties[name].custom = function
        step = self.step
        self._restart()
        self.seek(step)

    def current(self, step: int) -> dict[str, int]:
        """Difficulty of every metric while update number `step` (from 0) is made."""
        return {name: schedule.at(step + 1) for name, schedule in self.difficulties.items()}

    def seek(self, step: int) -> None:
        """Be where `batch` gives that of update `step`, from 0."""
        if step < self.step:
            self._restart()
        while self.step < step:
            self._draw()

    def batch(self) -> Ids:
        """The samples of the next update, in the order of micro-batches and ranks."""
        step = self.step
        found = self._draw()
        mixed: Ids = found[np.random.default_rng((self.policy.seed, _OF_UPDATE, step, 1)).permutation(len(found))]
        return mixed

    def _restart(self) -> None:
        self.step = 0
        self._clusters: list[Cluster] = []
        self._admitted = np.zeros(self.num_samples, bool)
        self._last: dict[str, int] = {}

    def _draw(self) -> Ids:
        self._admit()
        sizes = np.array([len(cluster.samples) for cluster in self._clusters])
        draw = np.random.default_rng((self.policy.seed, _OF_UPDATE, self.step, 0))
        counts = _within(draw.multinomial(self.batch_size, sizes / sizes.sum()), sizes)
        self.step += 1
        return np.concatenate([cluster.take(int(count)) for cluster, count in zip(self._clusters, counts)])

    def _admit(self) -> None:
        now = {a.metric.name: self.difficulties[a.metric.name].at(self.step + 1) for a in self._admissions}
        if now == self._last and self._clusters:
            return
        self._last = now
        admitted = np.ones(self.num_samples, bool) if not self._admissions else self._easy_enough(now)
        order = self._admissions[0].samples(now[self._admissions[0].metric.name]) if self._admissions else None
        new = (
            np.flatnonzero(admitted & ~self._admitted) if order is None else order[(admitted & ~self._admitted)[order]]
        )
        self._admitted |= admitted
        if len(new):
            self._clusters.append(Cluster(len(self._clusters), new.astype(np.int64), self.policy.seed))
        if not self._clusters:
            shown = ", ".join(f"{name} {value}" for name, value in now.items())
            raise ValueError(
                f"no sample is easy enough at update {self.step + 1} ({shown}): raise min_difficulty, or analyse the "
                "data set again"
            )

    def _easy_enough(self, now: Mapping[str, int]) -> NDArray[np.bool_]:
        found = np.ones(self.num_samples, bool)
        for admission in self._admissions:
            mine = np.zeros(self.num_samples, bool)
            mine[admission.samples(now[admission.metric.name])] = True
            found &= mine
        return found


def _within(counts: NDArray[Any], sizes: NDArray[Any]) -> NDArray[Any]:
    """No more from a cluster than it has, as long as others have room; only then is a sample seen twice."""
    over = int(np.maximum(counts - sizes, 0).sum())
    counts = np.minimum(counts, sizes)
    for number in range(len(counts)):
        more = min(over, int(sizes[number] - counts[number]))
        counts[number] += more
        over -= more
    while over > 0:
        more = min(over, int(sizes.sum()))
        counts = counts + _within(np.array([more, *[0] * (len(sizes) - 1)]), sizes)
        over -= more
    return counts


def rank_part(batch: Sequence[int] | Ids, micro_step: int, micro_size: int, world: int, rank: int) -> list[int]:
    """What one rank sees of an update in one of its forwards."""
    start = (micro_step * world + rank) * micro_size
    return [int(sample) for sample in batch[start : start + micro_size]]
