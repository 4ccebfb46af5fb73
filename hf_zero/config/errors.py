"""What is wrong with a config, said so that its author can mend it."""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass

from hf_zero.config.deepspeed_errors import kinds_of, shown_rule

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
    """A value as the user wrote it, short, and never raising: this text goes into error messages."""
    if value is True or value is False or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    try:
        return _short.repr(value)
    except Exception:  # any foreign __repr__, or an int too long for Python to print
        return f"<{type(value).__name__}>"


def key_path(around: str, key: str) -> str:
    """The path of a key inside a section; a key that would not read well bare is quoted."""
    shown = key if _BARE.fullmatch(key) else show(key)
    return f"{around}.{shown}" if around else shown


@dataclass(frozen=True, slots=True)
class Other:
    """The second of two values that contradict each other: its name, and where it came from."""

    name: str
    value: object
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.name} = {show(self.value)}" + (f"  [{self.origin}]" if self.origin else "")


@dataclass(frozen=True, slots=True)
class Edit:
    """What mends a key without asking its author: another place for it, another value, or, with neither, removal."""

    path: tuple[str, ...]
    to: tuple[str, ...] = ()
    value: object = ABSENT

    def __str__(self) -> str:
        name = ".".join(self.path)
        if self.to:
            return f"{name} becomes {'.'.join(self.to)}" + ("" if self.value is ABSENT else f" = {show(self.value)}")
        return f"{name} is removed" if self.value is ABSENT else f"{name} becomes {show(self.value)}"


@dataclass(frozen=True, slots=True)
class Remark:
    """Something worth saying about a key that stops nothing."""

    path: str
    text: str
    value: object = ABSENT
    ignored: bool = False  # its author asked for something that does not happen: said as a warning
    edit: Edit | None = None

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to mend: where it is, what stands there, what contradicts it, the rule, and what to do."""

    path: str
    value: object
    rule: str
    fix: str
    origin: str = ""  # where the value came from: ds.json:7, a flag, a default
    other: Other | None = None
    edit: Edit | None = None  # for `explain --fix`

    def __str__(self) -> str:
        head = self.path if self.value is ABSENT else f"{self.path} = {show(self.value)}"
        head += f"  [{self.origin}]" if self.origin else ""
        against = f"\n    but:  {self.other}" if self.other else ""
        rule = shown_rule(self.path, self.rule, show(self.value))
        return f"{head}{against}\n    rule: {rule}\n    fix:  {self.fix}"


class DeepSpeedConfigError(Exception):
    """What DeepSpeed calls an unusable config; ours is one, so that callers who catch it catch ours."""


class ConfigError(DeepSpeedConfigError, ValueError):
    """A configuration that cannot be used; lists every problem found, not only the first.

    An instance also is of the types that DeepSpeed raises for such problems (AssertionError, TypeError ...), so that
    what was written to catch those catches it.
    """

    def __new__(
        cls, problems: Problem | Iterable[Problem], headline: str = "this config cannot be used"
    ) -> ConfigError:
        given = (problems,) if isinstance(problems, Problem) else tuple(problems)
        kinds = frozenset(kind for one in given for kind in kinds_of(one.path, one.rule, one.value))
        error: ConfigError = super().__new__(_raised_as(kinds))
        error.problems = given  # may have been an iterator, which gives its entries once
        return error

    def __init__(self, problems: Problem | Iterable[Problem], headline: str = "this config cannot be used") -> None:
        self.problems: tuple[Problem, ...]
        self.headline = headline
        count = len(self.problems)
        lines = [f"{headline} ({count} problem{'' if count == 1 else 's'}):"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...], str]]:
        # Errors travel between processes; the default would hand the finished text back to __init__.
        return (ConfigError, (self.problems, self.headline))


@functools.cache
def _raised_as(kinds: frozenset[type[Exception]]) -> type[ConfigError]:
    bases: tuple[type, ...] = (ConfigError, *sorted(kinds, key=lambda kind: kind.__name__))
    # Under the name by which it is known: tracebacks show it.
    named = {"__module__": ConfigError.__module__, "__doc__": ConfigError.__doc__}
    return type(ConfigError.__name__, bases, named) if kinds else ConfigError
