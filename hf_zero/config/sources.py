"""Sources of values: the place of each key in a file, and what filled in each "auto"."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hf_zero.config.errors import key_path

Kind = Literal[
    "file", "text", "dict", "training", "flag", "environment", "accelerator", "script", "model", "derived", "default"
]
Path = tuple["str | int", ...]
MAX_DEPTH = 24  # deeper than any real config; keeps recursion shallow


@dataclass(frozen=True, slots=True)
class TextPlace:
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
        self.places: dict[str, TextPlace] = {}  # by dotted path
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


# For these keys, "auto" is a regular value.
_AUTO_IS_A_VALUE = (
    "data_types.keep_in_fp32_modules",
    "pipeline",
    "zero_optimization.offload_optimizer.ratio",
    "zero_optimization.zenflow",
)


def is_auto(value: object) -> bool:
    """Whether this is the literal "auto"."""
    return isinstance(value, str) and value == "auto"


def auto_is_a_value(path: str) -> bool:
    """Whether "auto" is a regular value of the key at `path`, which nobody fills in."""
    return any(path == place or path.startswith(f"{place}.") for place in _AUTO_IS_A_VALUE)


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
