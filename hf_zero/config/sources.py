"""Sources of values: the place of each key in a file, and what filled in each "auto".

Views provide the values for "auto": they are small frozen forms of TrainingArguments, Accelerator and model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from hf_zero.config.errors import key_path

Kind = Literal[
    "file", "text", "dict", "training", "flag", "environment", "accelerator", "script", "model", "derived", "default"
]
Path = tuple["str | int", ...]
MAX_DEPTH = 24  # deeper than any real config; keeps recursion shallow


@dataclass(frozen=True, slots=True)
class Place:
    """A position in a text, counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a value; `text` is for messages ("ds.json:7", "--learning_rate")."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return self.text


DEFAULT = Source("default", "default")


class ConfigDict(dict[str, Any]):
    """A config as a plain dict that remembers the places of its keys, and what filled in each "auto".

    This information survives when transformers and accelerate copy the config and pass it on.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.name = ""  # the file; "" for a dict
        self.places: dict[str, Place] = {}  # by dotted path
        self.filled: dict[str, Source] = {}  # by dotted path: keys that were "auto", and the source of their value
        self._assumed: dict[str, object] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        self._assumed.pop(key, None)
        super().__setitem__(key, value)

    def assume(self, key: str, value: object) -> None:
        """Set a placeholder for a missing value, for code that reads it before it is known."""
        if key not in self:
            self[key] = value
            self._assumed[key] = value

    def assumes(self, path: str) -> bool:
        """Whether the value is such a placeholder."""
        return path in self._assumed and self.get(path) == self._assumed[path]

    def __deepcopy__(self, memo: dict[int, Any]) -> ConfigDict:
        copied = ConfigDict()
        memo[id(self)] = copied
        copied.update({key: copy.deepcopy(value, memo) for key, value in self.items()})
        copied.name, copied.places, copied.filled = self.name, dict(self.places), dict(self.filled)
        copied._assumed = dict(self._assumed)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        # Trainer pickles its arguments (training_args.bin); the file must load without hf_zero.
        return (dict, (dict(self),))

    def rename(self, old: str, new: str) -> None:
        """Move the information about one key to another."""
        if old in self.places:
            self.places[new] = self.places.pop(old)
        if old in self.filled:
            self.filled[new] = self.filled.pop(old)

    def source_of(self, path: str) -> Source:
        """Return the source of the value at a dotted path."""
        if path in self.filled:
            return self.filled[path]
        if self.assumes(path):
            return Source("default", "default, since none is given")
        place = self.places.get(path)
        if place is None:
            return Source("dict", "the config")
        if self.name:
            return Source("file", f"{self.name}:{place.line}")
        return Source("text", f"line {place.line} of the config text")


def source_in(config: object, path: str) -> Source:
    """Like `ConfigDict.source_of`, for any config; a plain dict has no places."""
    return config.source_of(path) if isinstance(config, ConfigDict) else Source("dict", "the config")


def is_auto(value: object) -> bool:
    """Whether this is the literal "auto"."""
    return isinstance(value, str) and value == "auto"


# Sources that may replace a value that they filled in earlier: Trainer, when its arguments or the number of steps have
# changed, and the model. Values from a launcher or a script are final.
_MAY_RETURN = ({"training", "flag"}, {"model"})


def is_open(config: object, path: str, value: object, offered: Source) -> bool:
    """Whether the value is "auto", or was "auto" and may be replaced by the offering source."""
    if is_auto(value):
        return True
    if not isinstance(config, ConfigDict):
        return False
    if config.assumes(path):
        return True
    before = config.filled.get(path)
    return before is not None and any({before.kind, offered.kind} <= family for family in _MAY_RETURN)


def dotted(path: Path) -> str:
    """Format a path like zero_optimization.leaf_module.classes[0]."""
    text = ""
    for step in path:
        text = f"{text}[{step}]" if isinstance(step, int) else key_path(text, step)
    return text


def leaves(
    config: Mapping[Any, Any], path: tuple[str, ...] = (), around: frozenset[int] = frozenset()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every path of text keys that leads to a non-section value, and the value. Skips recursive sections."""
    around |= {id(config)}
    for key, value in list(config.items()):
        if not isinstance(key, str):
            continue
        if not isinstance(value, Mapping):
            yield (*path, key), value
        elif id(value) not in around and len(path) < MAX_DEPTH:
            yield from leaves(value, (*path, key), around)


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
