"""The section data_sampling: samplers for Trainer's loader and for the engine's, and changes to batches.

`LengthCurriculum` shortens the sequences of batches for the older section curriculum_learning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Sampler

from hf_zero.config import Resolved, resolve
from hf_zero.extras.data_efficiency.analyzer import IndexedRows
from hf_zero.extras.data_efficiency.difficulty import Custom, Difficulty
from hf_zero.extras.data_efficiency.rules import RESHAPE, TRUNCATE
from hf_zero.extras.data_efficiency.section import MetricPolicy, SamplingPolicy, data_policy
from hf_zero.features import Draw, Progress, TrainingFeature

# The samples of every update are a pure function of the settings, the data and the update's number.
#
# At every update the difficulties may admit more samples; the newly admitted ones form a *cluster*. A batch draws from
# each cluster in proportion to its size; each pass over a cluster uses a new random order. The draws only depend on
# (seed, update) and (seed, cluster, pass), so that a stream resumes exactly at any update, with any number of ranks or
# workers.


Ids = NDArray[np.int64]
_OF_UPDATE, _OF_CLUSTER = 1, 2


class Admission:
    """The samples that a metric admits at a difficulty, from the analyzer's files."""

    def __init__(self, metric: MetricPolicy, num_samples: int) -> None:
        self.metric = metric
        rows = IndexedRows(metric.index_to_sample)
        self._samples: Ids = rows.flat().astype(np.int64)  # easiest first
        self._ends: Ids = np.cumsum(rows.lengths, dtype=np.int64)
        self._values: Ids | None = None
        if len(self._samples) and not 0 <= self._samples.min() <= self._samples.max() < num_samples:
            raise ValueError(
                f"{metric.index_to_sample}: names sample {self._samples.max()}, but the data set has {num_samples}: "
                "analyze this data set (DataAnalyzer)"
            )
        if not metric.by_percentile:
            self._values = IndexedRows(metric.index_to_metric).flat().astype(np.int64)
            if len(self._values) != len(self._ends):
                raise ValueError(f"{metric.index_to_metric} and {metric.index_to_sample} are of different analyses")

    def samples(self, difficulty: int) -> Ids:
        """All samples that are easy enough, easiest first."""
        if self._values is not None:
            row = int(np.searchsorted(self._values, difficulty, side="right"))
            return self._samples[: int(self._ends[row - 1]) if row else 0]
        number, points = len(self._samples), self.metric.difficulty.maximum
        if difficulty >= points:
            return self._samples
        # All percentile points admit the same number of samples; the last one also admits the remainder.
        return self._samples[: number // points * difficulty if number >= points else number * difficulty // points]


@dataclass(slots=True)
class Cluster:
    """Samples admitted at the same update, drawn in repeated passes."""

    number: int
    samples: Ids
    seed: int
    passes: int = 0
    position: int = 0
    _order: Ids | None = field(default=None, repr=False)

    def take(self, count: int) -> Ids:
        """The next samples, without repetition unless `count` exceeds the size of the cluster."""
        parts: list[Ids] = []
        taken = 0
        while taken < count:
            if self._order is None:
                self._order = self._shuffled()
                if parts and count <= len(self.samples):  # samples of this batch come last in the new pass
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


class Difficulties(dict[str, Difficulty]):
    """The difficulty schedules of all metrics, by name."""

    def __init__(self, policy: SamplingPolicy) -> None:
        super().__init__((metric.name, Difficulty(metric.difficulty)) for metric in policy.metrics)

    def set_custom(self, functions: Mapping[str, Custom]) -> None:
        unknown = sorted(set(functions) - set(self))
        if unknown:
            raise ValueError(f"no such metric: {', '.join(unknown)}; the metrics are {', '.join(self)}")
        for name, function in functions.items():
            self[name].custom = function

    def current(self, step: int) -> dict[str, int]:
        """The difficulty of every metric in update `step` (from 0)."""
        return {name: schedule.at(step + 1) for name, schedule in self.items()}


class SampleStream:
    """The samples of all updates, in order.

    Args:
        num_samples: size of the data set.
        batch_size: samples per update, over all ranks.
        difficulties: schedules to share with others; default: new ones.

    Raises:
        ValueError: if the analyzer's files do not belong to this data set.
    """

    def __init__(
        self, policy: SamplingPolicy, num_samples: int, batch_size: int, difficulties: Difficulties | None = None
    ) -> None:
        self.policy = policy
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.num_updates = num_samples * policy.num_epochs // batch_size
        self.difficulties = Difficulties(policy) if difficulties is None else difficulties
        self._admissions = [Admission(metric, num_samples) for metric in policy.metrics if metric.chooses_samples]
        self._restart()

    def set_custom(self, functions: Mapping[str, Custom]) -> None:
        """Set the functions of custom schedules, by metric, and recompute the stream up to the current update."""
        self.difficulties.set_custom(functions)
        step = self.step
        self._restart()
        self.seek(step)

    def seek(self, step: int) -> None:
        """Move to update `step` (from 0), whose samples `batch` returns next."""
        if step < self.step:
            self._restart()
        while self.step < step:
            self._draw()

    def batch(self) -> Ids:
        """The samples of the next update, in the order of micro-batches and ranks."""
        step = self.step
        drawn = self._draw()
        mixed: Ids = drawn[np.random.default_rng((self.policy.seed, _OF_UPDATE, step, 1)).permutation(len(drawn))]
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
        admitted, order = self._easy_enough(now), np.arange(self.num_samples)
        if self._admissions:
            order = self._admissions[0].samples(now[self._admissions[0].metric.name])
        new = order[(admitted & ~self._admitted)[order]]
        self._admitted |= admitted
        if len(new):
            self._clusters.append(Cluster(len(self._clusters), new, self.policy.seed))
        if not self._clusters:
            shown = ", ".join(f"{name} {value}" for name, value in now.items())
            raise ValueError(
                f"no sample is easy enough at update {self.step + 1} ({shown}): raise min_difficulty, or analyze the "
                "data set again"
            )

    def _easy_enough(self, now: Mapping[str, int]) -> NDArray[np.bool_]:
        allowed = np.ones(self.num_samples, bool)
        for admission in self._admissions:
            mine = np.zeros(self.num_samples, bool)
            mine[admission.samples(now[admission.metric.name])] = True
            allowed &= mine
        return allowed


def _within(counts: NDArray[Any], sizes: NDArray[Any]) -> NDArray[Any]:
    """Limit counts to cluster sizes and move the excess to other clusters; samples repeat only if all are used up."""
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


_LEADERS = ("input_ids", "inputs_embeds", "decoder_input_ids", "labels", "attention_mask")


def sequence_length(batch: Mapping[str, Any]) -> int | None:
    """Tokens per row of a batch; None if it contains no sequences."""
    for name in _LEADERS:
        tensor = batch.get(name)
        if isinstance(tensor, Tensor) and tensor.dim() >= 2:
            return int(tensor.shape[1])
    return None


def truncate(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Keep the first `length` tokens of every row (the last ones if rows are padded on the left).

    Cuts tensors [B, S], [B, S, ...] and masks [B, 1, S, S]; others, such as labels of whole rows, are unchanged.
    """
    whole = sequence_length(batch)
    if whole is None or whole <= length:
        return dict(batch)
    start = whole - length if _is_padded_left(batch) else 0
    return {name: _cut(value, whole, start, length) for name, value in batch.items()}


def _is_padded_left(batch: Mapping[str, Any]) -> bool:
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] == 0:
        return False
    return bool((mask[:, 0] == 0).any() and (mask[:, -1] != 0).all())


def _cut(value: Any, whole: int, start: int, length: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() < 2:
        return value
    if value.dim() == 4 and value.shape[-1] == whole:  # a mask, which may have a single query row
        value = value.narrow(-1, start, length)
        return value.narrow(-2, start, length) if value.shape[-2] == whole else value
    return value.narrow(1, start, length) if value.shape[1] == whole else value


def reshape(batch: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Fold a batch into rows of `length` tokens: the full pieces of all rows, then the last `length` tokens of each
    row, until the batch's number of tokens is reached.

    Raises:
        ValueError: if the batch contains a tensor that is not [batch, tokens].
    """
    whole = sequence_length(batch)
    if whole is None or whole <= length:
        return dict(batch)
    return {name: _pieces(name, value, whole, length) for name, value in batch.items()}


def _pieces(name: str, value: Any, whole: int, length: int) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.dim() != 2 or value.shape[1] != whole:
        raise ValueError(
            f"seqlen_reshape: {name} has the shape {tuple(value.shape)} with rows of {whole} tokens; only tensors "
            "[batch, tokens] can be folded: use seqlen_truncate"
        )
    full = whole // length * length
    rows = torch.cat([value[:, :full].reshape(-1, length), value[:, whole - length :]])
    return rows[: min(-(-value.numel() // length), rows.shape[0])]


KEYWORD = "curriculum_seqlen"


class LengthCurriculum(TrainingFeature):
    """Truncates batches when they leave the loader and, in custom loops, before the model's forward.

    A model whose forward takes `curriculum_seqlen` gets the length and truncates itself, as with DeepSpeed.
    """

    name = "curriculum_learning"

    def __init__(self, difficulty: Difficulty, model_cuts: bool = False) -> None:
        self.difficulty = difficulty
        self._model_cuts = model_cuts

    def length(self, progress: Progress) -> int:
        """Tokens per row in the current update."""
        return self.difficulty.at(progress.step + 1)

    def on_batch(self, progress: Progress, batch: Any) -> Any:
        if self._model_cuts or not isinstance(batch, Mapping):
            return batch
        return truncate(batch, self.length(progress))

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        if not progress.training:
            return keywords
        if self._model_cuts:
            return {**keywords, KEYWORD: self.length(progress)}
        return truncate(keywords, self.length(progress))

    def set_custom_get_difficulty(self, function: Custom) -> None:
        self.difficulty.custom = function

    def state_dict(self) -> Mapping[str, Any]:
        """The schedule, for information only: the length follows from the number of updates."""
        return {"schedule": self.difficulty.policy.schedule, "max_difficulty": self.difficulty.policy.maximum}


def length_curriculum_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    policy = data_policy(resolved).sequence_length
    if policy is None:
        return None
    return LengthCurriculum(Difficulty(policy), model_cuts=KEYWORD in inspect.signature(model.forward).parameters)


PostProcess = Callable[[Any, Mapping[str, Any]], Any]


class SampledCurriculumFeature(TrainingFeature):
    """Holds the metrics' difficulties, truncates or folds batches by them, and provides streams that choose samples."""

    name = "data_sampler"

    def __init__(self, policy: SamplingPolicy) -> None:
        self.policy = policy
        self.schedules = Difficulties(policy)
        self.streams: list[SampleStream] = []
        self.post_process: PostProcess | None = None
        self.next_step = 0  # update at which the engine's loader begins

    def current(self, progress: Progress) -> dict[str, int]:
        return self.schedules.current(progress.step)

    def set_custom(self, functions: Mapping[str, Custom]) -> None:
        self.schedules.set_custom(functions)
        for stream in self.streams:
            stream.set_custom(functions)

    def loader_options(self, draw: Draw) -> dict[str, Any]:
        options: dict[str, Any] = {"num_workers": self.policy.num_workers}
        if draw.num_samples is not None and self.policy.chooses_samples:
            stream = SampleStream(self.policy, draw.num_samples, draw.per_update, self.schedules)
            self.streams.append(stream)
            size, world, rank = draw.micro_batch_size, draw.world, draw.rank
            options["batch_sampler"] = RankBatches(stream, size, world, rank, lambda: self.next_step)
        return options

    def on_batch(self, progress: Progress, batch: Any) -> Any:
        """Apply the length metrics to a training batch, and then the user's function."""
        now = self.current(progress)
        if TRUNCATE in now and isinstance(batch, Mapping):
            batch = truncate(batch, now[TRUNCATE])
        if RESHAPE in now and isinstance(batch, Mapping):
            batch = reshape(batch, now[RESHAPE])
        if self.post_process is not None:
            return self.post_process(batch, {"current_difficulties": now})
        return batch

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        """Truncate batches of custom loops, too; only the loader can fold them or call the user's function."""
        if progress.training and TRUNCATE in self.schedules:
            return truncate(keywords, self.current(progress)[TRUNCATE])
        return keywords

    def after_step(self, progress: Progress, *, applied: bool) -> None:
        self.next_step = progress.step

    def state_dict(self) -> Mapping[str, Any]:
        return {"curriculum_step": self.next_step, "seed": self.policy.seed}

    def load_state_dict(self, state: Mapping[str, Any] | None, progress: Progress) -> None:
        """Set the position of streams, which only depends on the number of updates."""
        self.next_step = progress.step


class StreamSampler(Sampler[int]):
    """Yields single samples, for a loader that deals batches to ranks in turn (Trainer's, through Accelerate).

    An epoch consists of as many full updates as the data set has samples for, at least one.
    """

    def __init__(self, stream: SampleStream) -> None:
        self.stream = stream
        self.epoch = 0
        self._updates = max(1, stream.num_samples // stream.batch_size)

    def __len__(self) -> int:
        return self._updates * self.stream.batch_size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        first = self.epoch * self._updates
        for step in range(first, first + self._updates):
            self.stream.seek(step)
            yield from self.stream.batch().tolist()
        self.epoch += 1  # for programs that never call set_epoch


class RankBatches(Sampler[list[int]]):
    """Micro-batches of one rank, starting at the current update of training."""

    def __init__(
        self, stream: SampleStream, micro_size: int, world: int, rank: int, first_step: Callable[[], int] = lambda: 0
    ) -> None:
        self.stream = stream
        self._micro_size, self._world, self._rank = micro_size, world, rank
        self._first_step = first_step
        self._per_update = stream.batch_size // (micro_size * world)

    def __len__(self) -> int:
        return self.stream.num_updates * self._per_update

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(self._first_step(), self.stream.num_updates):
            self.stream.seek(step)
            batch = self.stream.batch().tolist()
            for micro_step in range(self._per_update):
                start = (micro_step * self._world + self._rank) * self._micro_size
                yield batch[start : start + self._micro_size]


class DeepSpeedDataSampler(RankBatches):
    """DeepSpeed's batch sampler, with its arguments.

    Args:
        data_efficiency_config: the section data_efficiency.
    """

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any,
        gradient_accumulation_steps: int,
        global_rank: int,
        drop_last: bool = True,
    ) -> None:
        config = {"train_micro_batch_size_per_gpu": 1, "data_efficiency": dict(data_efficiency_config)}
        policy = data_policy(resolve(config, world_size=1)).sampling
        if policy is None:
            raise ValueError(
                "DeepSpeedDataSampler: data_sampling.curriculum_learning is not enabled in the section; without it use "
                "torch.utils.data.DistributedSampler"
            )
        self._step = 0
        total = micro_batch_size * data_parallel_size * gradient_accumulation_steps
        stream = SampleStream(policy, one_epoch_total_samples, total)
        super().__init__(stream, micro_batch_size, data_parallel_size, data_parallel_rank, lambda: self._step)

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Custom]) -> None:
        self.stream.set_custom(schedule_func_dict)

    def state_dict(self) -> dict[str, Any]:
        """The stream's position, after the update whose batches were drawn last."""
        step = self.stream.step
        return {"curriculum_step": step, "consumed_samples": step * self.stream.batch_size}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._step = int(state_dict["curriculum_step"])


def sampled_curriculum_of(_model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    policy = data_policy(resolved).sampling
    return None if policy is None else SampledCurriculumFeature(policy)


def sampler_for(raw: Mapping[str, Any], num_samples: int, batch_size: int) -> StreamSampler | None:
    """The sampler for Trainer's training loader; None if the config does not choose samples.

    Raises:
        ConfigError: if the section is invalid; ValueError: if the analyzer's files do not match the data, or the
            section enables dynamic_batching, which Trainer's loader does not support.
    """
    config = {"train_micro_batch_size_per_gpu": 1, "data_efficiency": raw.get("data_efficiency") or {}}
    asked = data_policy(resolve(config, world_size=1))
    if asked.packing is not None:
        raise ValueError(
            "data_efficiency.data_sampling.dynamic_batching.enabled = True: Trainer's loader makes batches of a number "
            "of samples. Disable it and set TrainingArguments(train_sampling_strategy='group_by_length'), or use a "
            "custom training loop with get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed "
            "(docs/data_efficiency.md)"
        )
    policy = asked.sampling
    if policy is None or not policy.chooses_samples:
        return None
    return StreamSampler(SampleStream(policy, num_samples, batch_size))
