"""Config sections of data efficiency (curricula, sampling, token and layer dropping), and their policies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from hf_zero.config.policies import Resolved
from hf_zero.config.schema.fields import (
    Count,
    Flag,
    Fraction,
    NonNegative,
    PathText,
    Positive,
    Section,
    Whole,
    as_lower,
    check,
    detail,
    ignored,
    supported,
)

_MEMORY = "every rank computes clusters from the index files in memory"


def _scaling(value: object) -> object:
    return "none" if value is None else as_lower(value)


def _as_metrics(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("must be an object {...} of metrics by name")
    return value


Schedule = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]
Scaling = Annotated[Literal["linear", "sqrt", "none"], BeforeValidator(_scaling)]
PickingOrder = Annotated[Literal["dataloader", "random", "seqlen"], BeforeValidator(as_lower)]
Metrics = Annotated[dict[str, Any], BeforeValidator(_as_metrics)]


class ScheduleConfig(Section):
    """Parameters of a difficulty schedule."""

    total_curriculum_step: Positive | None = supported(None, "fixed_linear, fixed_root: updates until the maximum.")
    difficulty_step: Positive | None = supported(None, "fixed_linear, fixed_root: difficulties are multiples of it.")
    root_degree: Positive | None = supported(None, "fixed_root: the degree.")
    difficulty: list[Count] | None = supported(None, "fixed_discrete: the difficulties.")
    max_step: list[Count] | None = supported(None, "fixed_discrete: last update of each difficulty except the last.")


class CurriculumLearning(Section):
    """Training starts with short sequences, which grow."""

    enabled: Flag | None = supported(None, "Truncate training batches to the update's difficulty; required.")
    curriculum_type: str | None = supported(None, "Must be seqlen.")
    min_difficulty: Positive | None = supported(None, "Initial length.", unit="tokens")
    max_difficulty: Positive | None = supported(None, "Final length.", unit="tokens")
    schedule_type: Schedule | None = supported(None, "Type of the schedule.")
    schedule_config: ScheduleConfig | None = detail(None, "Parameters of the schedule.")


class CurriculumMetric(Section):
    """One metric in curriculum_metrics."""

    difficulty_type: Literal["value", "percentile"] | None = supported(
        None, "value: samples up to the difficulty; percentile: the first difficulty/max of all samples."
    )
    clustering_type: str | None = supported(
        None, "schedule_based: choose samples; single_cluster: the difficulty only applies to batches."
    )
    index_to_sample_path: PathText | None = supported(None, "The analyzer's file, without its suffix.")
    index_to_metric_path: PathText | None = supported(None, "The analyzer's file; only for value.")
    min_difficulty: Count | None = supported(None, "Initial difficulty.")
    max_difficulty: Positive | None = supported(None, "Final difficulty.")
    schedule_type: Schedule | None = supported(None, "Type of the schedule.")
    schedule_config: ScheduleConfig | None = detail(None, "Parameters of the schedule.")


class SampledCurriculum(Section):
    """Easy samples first, according to metrics."""

    enabled: Flag = supported(False, "Choose samples by their metrics.")
    data_cluster_path: PathText | None = ignored(None, "Folder for cluster files.", why=_MEMORY)
    curriculum_metrics: Metrics | None = supported(
        None,
        "By name: difficulty_type, clustering_type, index_to_sample_path, index_to_metric_path, min_difficulty, "
        "max_difficulty, schedule_type, schedule_config. seqlen_truncate and seqlen_reshape also act on batches.",
    )


class DynamicBatching(Section):
    """Batches with about the same number of tokens, in custom loops (docs/data_efficiency.md)."""

    enabled: Flag = supported(False, "Build batches by number of tokens.")
    max_tokens: Positive | None = supported(None, "Maximum tokens per pack; required.", unit="tokens")
    metrics_path: PathText | None = supported(None, "Folder with the analyzer's metric seqlen.")
    lr_scaling_method: Scaling = supported("linear", "Scaling of the learning rate with an update's samples.")
    min_batch_size: Positive = supported(1, "Minimum samples per pack.", unit="samples")
    max_batch_size: Positive | None = supported(None, "Maximum samples per pack.", unit="samples")
    sequence_picking_order: PickingOrder = supported("dataloader", "Order of samples; random differs between epochs.")
    verbose: Flag = supported(False, "Log the learning rate of every update.")


class DataSampling(Section):
    """Choice and order of the samples."""

    enabled: Flag | None = supported(None, "false disables the whole section.")
    num_epochs: Positive = supported(1000, "Epochs after which the engine's loader ends.", unit="epochs")
    num_workers: Count = supported(0, "Workers of the engine's loader.")
    pin_memory: Flag = supported(False, "Pin batches of dynamic_batching; other loaders decide by the device.")
    curriculum_learning: SampledCurriculum | None = detail(None, "Choose samples by metrics.")
    dynamic_batching: DynamicBatching | None = detail(None, "Batches by number of tokens.")


class LtdScheduleConfig(Section):
    """Parameters of the random-LTD schedule."""

    require_steps: Positive | None = supported(None, "Updates until all tokens are kept.")
    seq_per_step: Positive | None = supported(None, "Kept tokens are multiples of it.", unit="tokens")


class LtdSchedule(Section):
    """Schedule of the number of tokens that layers keep."""

    min_value: Positive | None = supported(None, "Initial number of tokens.", unit="tokens")
    max_value: Positive | None = supported(None, "Final number of tokens.", unit="tokens")
    schedule_type: Literal["fixed_linear"] | None = supported(None, "fixed_linear.")
    schedule_config: LtdScheduleConfig | None = detail(None, "Its parameters.")


class LayerTokenLr(Section):
    """The learning rate by layer tokens."""

    enabled: Flag = supported(
        False, "The schedule advances by the share of layer tokens that an update has computed (DeepSpeed refuses it)."
    )


class RandomLTDSection(Section):
    """Random layerwise token dropping."""

    enabled: Flag = supported(False, "Drop tokens in the listed layers.")
    total_layer_num: Positive | None = supported(None, "Layers of the model.")
    random_ltd_layer_num: Count | None = check(None, "Must be the length of random_ltd_layer_id.")
    random_ltd_layer_id: list[Count] | None = supported(None, "Indices of the layers, from 0.")
    model_mask_name: str | None = supported(None, "Name of the layers' mask argument; null: none.")
    model_type: Literal["decoder", "encoder"] | None = ignored(
        None, "decoder or encoder.", why="any mask is reduced to the kept tokens", met=True
    )
    hidden_state_order: Literal["batch_seq_dim", "seq_batch_dim"] | None = supported(
        None, "Dimensions of hidden states."
    )
    random_ltd_schedule: LtdSchedule | None = detail(None, "Its schedule.")
    layer_token_lr_schedule: LayerTokenLr | None = detail(None, "The learning rate.")
    micro_batch_size: Whole | None = ignored(None, "Filled in by DeepSpeed.", why="set by the batch sizes", met=True)
    global_batch_size: Whole | None = ignored(None, "Filled in by DeepSpeed.", why="set by the batch sizes", met=True)


class DataRouting(Section):
    """Token dropping in layers."""

    enabled: Flag | None = supported(None, "false disables the whole section.")
    random_ltd: RandomLTDSection | None = detail(None, "Random token dropping.")


class DataEfficiency(Section):
    """Sampling and token dropping."""

    enabled: Flag | None = supported(None, "false disables the whole section.")
    seed: Count = supported(1234, "Seed of all random draws here.")
    data_sampling: DataSampling | None = detail(None, "Choice of samples.")
    data_routing: DataRouting | None = detail(None, "Token dropping in layers.")


class ProgressiveLayerDropSection(Section):
    """Random layer dropping (arXiv 2010.13369)."""

    enabled: Flag = supported(False, "Drop layers at random: deeper ones more often, and more as training proceeds.")
    theta: Fraction = supported(1.0, "Final keep probability of the deepest layers.")
    gamma: NonNegative = supported(0.001, "Rate of the decay to theta.")


# Policies of data efficiency; None for disabled features.


@dataclass(frozen=True, slots=True, kw_only=True)
class DifficultyPolicy:
    """A difficulty schedule over updates, counted from 1."""

    schedule: Schedule
    minimum: int
    maximum: int
    total_steps: int = 1  # fixed_linear, fixed_root: the update that reaches the maximum
    multiple: int = 1  # fixed_linear, fixed_root: difficulties are multiples of it
    degree: int = 1  # fixed_root
    difficulties: tuple[int, ...] = ()  # fixed_discrete
    last_steps: tuple[int, ...] = ()  # fixed_discrete: last update of every difficulty except the last


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPolicy:
    """One metric of a curriculum."""

    name: str
    difficulty: DifficultyPolicy
    by_percentile: bool = False  # difficulty d: the first d / maximum of the samples; else: samples up to d
    chooses_samples: bool = True  # False: the difficulty only applies to batches
    index_to_sample: str = ""  # paths of the analyzer's files, without .bin and .idx
    index_to_metric: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPolicy:
    """Choice of samples by metrics."""

    seed: int
    num_epochs: int
    num_workers: int
    metrics: tuple[MetricPolicy, ...]

    @property
    def chooses_samples(self) -> bool:
        return any(metric.chooses_samples for metric in self.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPolicy:
    """Batches by number of tokens."""

    max_tokens: int  # per pack
    min_samples: int = 1
    max_samples: int | None = None
    order: str = "dataloader"  # or random, seqlen
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        orders = ("dataloader", "random", "seqlen")
        if self.order not in orders:
            raise ValueError(f"sequence_picking_order {self.order!r}: must be {', '.join(orders)}")

    @property
    def limits(self) -> str:
        """The limits of a pack, for messages."""
        most = f" and {self.max_samples} samples" if self.max_samples is not None else ""
        least = f", at least {self.min_samples} samples" if self.min_samples > 1 else ""
        return f"at most {self.max_tokens} tokens{most}{least}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLTDPolicy:
    """Token dropping in some layers, which decreases over training."""

    num_layers: int
    layer_ids: tuple[int, ...]
    mask_name: str | None
    sequence_first: bool  # hidden states are [S, B, hidden]
    min_tokens: int
    max_tokens: int
    total_steps: int
    multiple: int
    scales_schedule: bool = False  # the learning-rate schedule advances by layer tokens
    seed: int = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPolicy:
    """The policies of all sections of data efficiency."""

    sequence_length: DifficultyPolicy | None = None  # of the older section, curriculum_learning
    sampling: SamplingPolicy | None = None
    packing: PackingPolicy | None = None
    random_ltd: RandomLTDPolicy | None = None
    layer_drop: ProgressiveLayerDropSection | None = None


def data_policy(resolved: Resolved) -> DataPolicy:
    policy: DataPolicy = resolved.extras.get("data_efficiency", DataPolicy())
    return policy
