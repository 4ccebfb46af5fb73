"""Errors in a config, worded so that its author can fix them.

An error also has the type and the distinctive words of DeepSpeed's error for the same problem, because scripts catch
the type, test suites use `pytest.raises(..., match=...)`, and people search for the words. These words are an interface
like the names of keys; the rest of the message is ours. `tests/config/wrong_setups.py` lists them for each set-up, or
the reason why there are none, and a test compares them with a real DeepSpeed.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

FEATURES_PAGE = "docs/features.md"

_BARE = re.compile(r"[\w$/#.-]{1,100}", re.ASCII)
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100
_short.maxdict = _short.maxlist = 6


class _Absent:
    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


def show(value: object) -> str:
    """Format a value as the user wrote it, shortened, for error messages. Never raises."""
    if value is True or value is False or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    try:
        return _short.repr(value)
    except Exception:  # any foreign __repr__, or an int too long for Python to print
        return f"<{type(value).__name__}>"


def key_path(around: str, key: str) -> str:
    """Return the path of a key inside a section. Unusual keys are quoted."""
    shown = key if _BARE.fullmatch(key) else show(key)
    return f"{around}.{shown}" if around else shown


def sentence(rule: str) -> str:
    """Add the subject, which the previous line names: "must be text" becomes "it must be text"."""
    first = rule.partition(" ")[0]
    if first in ("not", "neither"):
        return f"it is {rule}"
    return f"it {rule}" if first in ("must", "is", "has", "needs") else rule


@dataclass(frozen=True, slots=True)
class Other:
    """The second of two contradicting values: its name and its source."""

    name: str
    value: object
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.name} = {show(self.value)}" + (f"  [{self.origin}]" if self.origin else "")


@dataclass(frozen=True, slots=True)
class Edit:
    """An automatic fix of a key: a new path, a new value, or, with neither, its removal."""

    path: tuple[str, ...]
    to: tuple[str, ...] = ()
    value: object = ABSENT

    @classmethod
    def at(cls, path: str, value: object = ABSENT) -> Edit:
        """Return the edit that removes the key at a dotted path, or gives it a value."""
        return cls(tuple(path.split(".")), value=value)

    def __str__(self) -> str:
        name = ".".join(self.path)
        if self.to:
            return f"{name} becomes {'.'.join(self.to)}" + ("" if self.value is ABSENT else f" = {show(self.value)}")
        return f"{name} is removed" if self.value is ABSENT else f"{name} becomes {show(self.value)}"


@dataclass(frozen=True, slots=True)
class Remark:
    """A note about a key that is not an error."""

    path: str
    text: str
    value: object = ABSENT
    ignored: bool = False  # the setting has no effect although it requests something, which gives a warning
    edit: Edit | None = None
    idle: bool = False  # the setting has no effect, but requests nothing either: its default, or written by a tool

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One error: its key path, the value, a contradicting value, the violated rule and the fix.

    Attributes:
        origin: the source of the value: ds.json:7, a flag, a default.
        edit: what `explain --fix` does.
        raises: the type of DeepSpeed's error, if it is not one of ConfigError's own.
        words: the words of DeepSpeed's error, which precede the rule.
    """

    path: str
    value: object
    rule: str
    fix: str
    origin: str = ""
    other: Other | None = None
    edit: Edit | None = None
    raises: type[Exception] | None = None
    words: str = ""

    @property
    def unusable(self) -> tuple[str, ...]:
        """The paths of the keys without a usable value: its own, and what an unknown key probably means."""
        meant = (".".join(self.edit.to),) if self.edit is not None and self.edit.to else ()
        return (*(part.partition("[")[0] for part in self.path.split(", ")), *meant)

    def __str__(self) -> str:
        head = self.path if self.value is ABSENT else f"{self.path} = {show(self.value)}"
        head += f"  [{self.origin}]" if self.origin else ""
        against = f"\n    but:  {self.other}" if self.other else ""
        rule = sentence(f"{self.words}: {self.rule}" if self.words else self.rule)
        return f"{head}{against}\n    rule: {rule}\n    fix:  {self.fix}"


Finding = Problem | Remark


class DeepSpeedConfigError(Exception):
    """DeepSpeed's error for an invalid config. ConfigError derives from it, so that its handlers catch ours, too."""


class ConfigError(DeepSpeedConfigError, ValueError):
    """An invalid configuration; lists every problem found, not only the first.

    An instance also has the types that DeepSpeed raises for such problems (AssertionError, TypeError ...), so that
    existing handlers catch it.
    """

    problems: tuple[Problem, ...]

    def __new__(cls, problems: Problem | Iterable[Problem], headline: str = "") -> ConfigError:
        given = (problems,) if isinstance(problems, Problem) else tuple(problems)
        kinds = {problem.raises for problem in given if problem.raises is not None}
        kind = _Several if len(kinds) > 1 else _BY_TYPE[kinds.pop()] if kinds else ConfigError
        error: ConfigError = super().__new__(kind)
        error.problems = given  # `problems` may have been an iterator, which cannot be read twice
        return error

    def __init__(self, problems: Problem | Iterable[Problem], headline: str = "this config cannot be used") -> None:
        self.headline = headline
        count = len(self.problems)
        lines = [f"{headline} ({count} problem{'' if count == 1 else 's'}):"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        super().__init__("\n".join(lines))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__name__ = cls.__qualname__ = "ConfigError"  # the documented name, which tracebacks show

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...], str]]:
        # Errors are pickled between processes; by default, __init__ would receive the finished text.
        return (ConfigError, (self.problems, self.headline))


class _Asserted(ConfigError, AssertionError): ...


class _Typed(ConfigError, TypeError): ...


class _Unimplemented(ConfigError, NotImplementedError): ...


class _Several(_Asserted, _Typed, _Unimplemented): ...


_BY_TYPE: dict[type[Exception], type[ConfigError]] = {
    AssertionError: _Asserted,
    TypeError: _Typed,
    NotImplementedError: _Unimplemented,
}
