"""What the sections of data efficiency come to: small frozen values, None for what is switched off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hf_zero.config.policies import Resolved
from hf_zero.extras.data_efficiency.section import ProgressiveLayerDrop

ScheduleType = Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DifficultyPolicy:
    """How a difficulty grows with the number of the update, the first being 1."""

    schedule: ScheduleType
    minimum: int
    maximum: int
    total_steps: int = 1  # fixed_linear, fixed_root: the update that has the maximum
    multiple: int = 1  # the same: difficulties are multiples of it
    degree: int = 1  # fixed_root
    difficulties: tuple[int, ...] = ()  # fixed_discrete
    last_steps: tuple[int, ...] = ()  # fixed_discrete: of every difficulty but the last, the last update that has it


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPolicy:
    """One metric of a curriculum."""

    name: str
    difficulty: DifficultyPolicy
    by_percentile: bool = False  # difficulty d: the first d / maximum of the samples; else: samples up to d
    chooses_samples: bool = True  # False: the difficulty is only for what becomes of a batch
    index_to_sample: str = ""  # paths of the analyzer's files, without .bin and .idx
    index_to_metric: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPolicy:
    """Which samples a training sees, and when."""

    seed: int
    num_epochs: int
    num_workers: int
    metrics: tuple[MetricPolicy, ...]

    @property
    def chooses_samples(self) -> bool:
        return any(metric.chooses_samples for metric in self.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPolicy:
    """Batches by tokens."""

    max_tokens: int  # of a pack
    min_samples: int = 1
    max_samples: int | None = None
    order: str = "dataloader"  # or random, seqlen
    scaling: str = "linear"  # of the learning rate with the number of samples; or sqrt, none
    seed: int = 0
    epoch: int = 0
    metrics_path: str | None = None  # the analyzer's folder
    num_workers: int = 0
    pin_memory: bool = False
    verbose: bool = False

    def __post_init__(self) -> None:
        orders = ("dataloader", "random", "seqlen")
        if self.order not in orders:
            raise ValueError(f"sequence_picking_order {self.order!r}: must be {', '.join(orders)}")

    @property
    def limits(self) -> str:
        """In words."""
        most = f" and {self.max_samples} samples" if self.max_samples is not None else ""
        least = f", at least {self.min_samples} samples" if self.min_samples > 1 else ""
        return f"at most {self.max_tokens} tokens{most}{least}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomLTDPolicy:
    """Tokens left out of some layers, fewer and fewer."""

    num_layers: int
    layer_ids: tuple[int, ...]
    mask_name: str | None
    is_decoder: bool
    sequence_first: bool  # hidden states are [S, B, hidden]
    min_tokens: int
    max_tokens: int
    total_steps: int
    multiple: int
    scales_schedule: bool = False  # the learning-rate schedule advances by layer tokens
    seed: int = 1234


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPolicy:
    """All of them."""

    sequence_length: DifficultyPolicy | None = None  # of the older section, curriculum_learning
    sampling: SamplingPolicy | None = None
    packing: PackingPolicy | None = None
    random_ltd: RandomLTDPolicy | None = None
    layer_drop: ProgressiveLayerDrop | None = None


def data_policy(resolved: Resolved) -> DataPolicy:
    """What a config asks of data efficiency."""
    found: DataPolicy = resolved.extras.get("data_efficiency", DataPolicy())
    return found
