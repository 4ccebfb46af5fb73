"""Views: small frozen forms of TrainingArguments, Accelerator and model, which provide the values for "auto"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from hf_zero.config.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingView:
    """The fields of TrainingArguments that have keys in ds.json. Defaults are those of transformers."""

    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    max_grad_norm: float = 1.0
    learning_rate: float = 5e-5
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    fp16: bool = False
    fp16_full_eval: bool = False
    bf16: bool = False
    bf16_full_eval: bool = False
    warmup_steps: float = 0.0  # at least 1: a number of updates; below 1: a fraction of all updates
    total_steps: int | None = None  # number of updates of the whole run; None: not known yet
    save_on_each_node: bool = False
    batch_size_may_vary: bool = False  # auto_find_batch_size searches for the batch size
    steps_only: bool = False  # only the numbers of steps are new; all else was filled and compared before
    origins: Mapping[str, str] = field(default_factory=dict)  # field -> "--learning_rate" where a flag set it

    def source(self, *names: str) -> Source:
        """Return the source of fields: a command-line flag or the script."""
        flags = [self.origins[name] for name in names if name in self.origins]
        if flags:
            return Source("flag", ", ".join(flags))
        shown = (f"TrainingArguments.{name}" + (" (its default)" if self.is_default(name) else "") for name in names)
        return Source("training", ", ".join(shown))

    def is_default(self, name: str) -> bool:
        default = next((entry.default for entry in fields(self) if entry.name == name), None)
        return bool(getattr(self, name, ...) == default)

    def warmup(self) -> int | None:
        """The number of warm-up updates, at least 1; None if it is a fraction of an unknown total."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        if self.warmup_steps == 0:
            return 1
        return None if self.total_steps is None else max(1, math.ceil(self.total_steps * self.warmup_steps))


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value with its source."""

    value: object
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorView:
    """Values from `Accelerator.prepare` and the launcher. Fields are empty if nothing was given."""

    prepares: bool = False  # `prepare` has been called, so missing values get Accelerate's defaults
    accumulation_steps: int | None = None
    batch_sizes: tuple[int, ...] = ()  # per process, for each prepared loader
    take_largest_batch: bool = False  # is_train_batch_min=False
    launched: Mapping[str, Given] = field(default_factory=dict)  # config path -> plugin field or environment variable
    optimizer: Mapping[str, object] = field(default_factory=dict)  # arguments of DummyOptim
    schedule: Mapping[str, object] = field(default_factory=dict)  # arguments of DummyScheduler; total per process
    max_lr: float | None = None  # learning rate of the optimizer that the schedule controls


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """A model's configuration, and the shapes of its parameters if there is a model."""

    config: Mapping[str, object] | None = None
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """The views that a config is resolved against."""

    world_size: int
    host_sizes: tuple[int, ...] = ()  # number of ranks of every host, if known
    training: TrainingView | None = None
    accelerator: AcceleratorView | None = None
    model: ModelView | None = None
    sequence_size: int | None = None  # ranks per sequence, if set outside the config
    tensor_size: int | None = None  # tensor-parallel size, if set outside the config
