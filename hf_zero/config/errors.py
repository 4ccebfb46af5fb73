"""Errors in a config, worded so that its author can fix them.

An error also has the type and the distinctive words of DeepSpeed's error for the same problem, because scripts catch
the type, test suites use `pytest.raises(..., match=...)`, and people search for the words. These words are an interface
like the names of keys; the rest of the message is ours. `tests/config/wrong_setups.py` lists them for each set-up, or
the reason why there are none, and a test compares them with a real DeepSpeed.
"""

from __future__ import annotations

import functools
import re
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_BATCH, _OF_CHOICE = "train_.*|gradient_accumulation_steps", r"(?:optimizer|scheduler)\.params\.(?P<key>.*)"
_EQUATION = "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size"
_EITHER = "train_batch_size or train_micro_batch_size_per_gpu"
_SOURCE = "Expected a string path to an existing deepspeed config, or a dictionary"

# From DeepSpeed 0.19.8: a regex for the whole path of the problem, one to search in our rule, the type (None: a
# ValueError or DeepSpeedConfigError, as all of ours are), and the format of our rule ("": unchanged).
_ANSWERS: tuple[tuple[str, str, type[Exception] | None, str], ...] = (
    (_BATCH, "must be at least 1", AssertionError, "has to be greater than 0: {rule}"),
    (_BATCH, "must be given", AssertionError, f"{_EITHER} needs to be provided: {{rule}}"),
    (_BATCH, "does not hold", AssertionError, f"{_EQUATION}: {{rule}}"),
    (_BATCH, "", AssertionError, ""),
    (r"fp16\.enabled, bf16\.enabled", "", AssertionError, "bfloat16 and fp16 modes cannot be simultaneously enabled"),
    (r"fp16\.loss_scale", "at least 0", None, "fp16.loss_scale must be >= 0"),
    (r"(?:fp16|bf16|zero_optimization)\..*", "no such key", None, "Extra inputs are not permitted: {rule}"),
    (r"optimizer\.type", "neither", AssertionError, "is not a supported DeepSpeed Optimizer: it {rule}"),
    (r"scheduler\.type", "neither|case", AssertionError, "hf_zero does not recognize LR scheduler {value}: {rule}"),
    (r"(?:optimizer|scheduler)\.type", "", AssertionError, ""),
    (r"(?:optimizer|scheduler)\.params", "", TypeError, ""),
    (_OF_CHOICE, "no such argument", TypeError, "got an unexpected keyword argument '{key}': {rule}"),
    (_OF_CHOICE, " needs ", TypeError, "missing 1 required positional argument: '{key}'; {rule}"),
    (_OF_CHOICE, "clipping", None, "'{key}' is not supported as an optimizer parameter: {rule}"),
    (r"scheduler\.params\.(?P<key>warmup_num_steps)", "at least 0", None, "{key} must be a positive integer or 0"),
    (r"(?P<key>communication_data_type|gradient_allreduce_op)", "must be", None, "Invalid {key}: {rule}"),
    (r"checkpoint\.tag_validation", "must be", None, "invalid tag_validation value: {rule}"),
    (r"checkpoint\.parallel_write\.(?P<key>.*)", "must be", None, "{key} value of {value} is invalid: {rule}"),
    (r"data_types\.grad_accum_dtype", "", NotImplementedError, "unsupported mix of model_dtype and this: {rule}"),
    (r"bf16\.(?P<key>bf16_.*states)", "", AssertionError, "{key} requires bf16_master_weights_and_grads: {rule}"),
    (r"bf16\.bf16_.*|fp16\.fp16_.*|data_types\.param_dtype", "", AssertionError, ""),
    ("log_level", "must be", None, "is not one of the valid logging levels: {rule}"),
    (
        "config",
        "no config",
        AssertionError,
        "{rule}: initialize() requires --deepspeed_config to specify configuration file",
    ),
    (r"config|args\.deepspeed_config", "given", AssertionError, ""),
    ("config", "is not a config|no such file", None, f"{_SOURCE}: {{rule}}"),
)


def _answer(path: str, rule: str) -> tuple[type[Exception] | None, str, str]:
    """Return type, rule format and the last key of the path from the first matching row."""
    for pattern, words, kind, shown in _ANSWERS:
        match = re.fullmatch(pattern, path)
        if match and re.search(words, rule):
            return kind, shown, match.groupdict().get("key", "")
    return None, "", ""


def kinds_of(path: str, rule: str, value: object) -> Iterator[type[Exception]]:
    """Yield the types, besides our own, of DeepSpeed's error for such a problem."""
    kind, _, _ = _answer(path, rule)
    if kind is not None:
        yield kind
    if value == "auto" and path.rpartition(", ")[2].startswith("train_"):
        yield TypeError  # DeepSpeed does arithmetic with the text


def shown_rule(path: str, rule: str, value: str) -> str:
    """Return our rule with DeepSpeed's words; `value` is already formatted."""
    _, shown, key = _answer(path, rule)
    return sentence(shown.format(rule=rule, value=value, key=key) if shown else rule)


def sentence(rule: str) -> str:
    """Add the subject, which the previous line names: "must be text" becomes "it must be text"."""
    first = rule.partition(" ")[0]
    if first in ("not", "neither"):
        return f"it is {rule}"
    return f"it {rule}" if first in ("must", "is", "has", "needs") else rule


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

    def __str__(self) -> str:
        return f"{self.path}: {self.text}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One error: its key path, the value, a contradicting value, the violated rule and the fix."""

    path: str
    value: object
    rule: str
    fix: str
    origin: str = ""  # the source of the value: ds.json:7, a flag, a default
    other: Other | None = None
    edit: Edit | None = None  # for `explain --fix`

    def __str__(self) -> str:
        head = self.path if self.value is ABSENT else f"{self.path} = {show(self.value)}"
        head += f"  [{self.origin}]" if self.origin else ""
        against = f"\n    but:  {self.other}" if self.other else ""
        rule = shown_rule(self.path, self.rule, show(self.value))
        return f"{head}{against}\n    rule: {rule}\n    fix:  {self.fix}"


class DeepSpeedConfigError(Exception):
    """DeepSpeed's error for an invalid config. ConfigError derives from it, so that its handlers catch ours, too."""


class ConfigError(DeepSpeedConfigError, ValueError):
    """An invalid configuration; lists every problem found, not only the first.

    An instance also has the types that DeepSpeed raises for such problems (AssertionError, TypeError ...), so that
    existing handlers catch it.
    """

    def __new__(
        cls, problems: Problem | Iterable[Problem], headline: str = "this config cannot be used"
    ) -> ConfigError:
        given = (problems,) if isinstance(problems, Problem) else tuple(problems)
        kinds = frozenset(kind for one in given for kind in kinds_of(one.path, one.rule, one.value))
        error: ConfigError = super().__new__(_raised_as(kinds))
        error.problems = given  # `problems` may have been an iterator, which cannot be read twice
        return error

    def __init__(self, problems: Problem | Iterable[Problem], headline: str = "this config cannot be used") -> None:
        self.problems: tuple[Problem, ...]
        self.headline = headline
        count = len(self.problems)
        lines = [f"{headline} ({count} problem{'' if count == 1 else 's'}):"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(self.problems, 1)]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...], str]]:
        # Errors are pickled between processes; by default, __init__ would receive the finished text.
        return (ConfigError, (self.problems, self.headline))


@functools.cache
def _raised_as(kinds: frozenset[type[Exception]]) -> type[ConfigError]:
    bases: tuple[type, ...] = (ConfigError, *sorted(kinds, key=lambda kind: kind.__name__))
    # The class keeps the documented name, which tracebacks show.
    named = {"__module__": ConfigError.__module__, "__doc__": ConfigError.__doc__}
    return type(ConfigError.__name__, bases, named) if kinds else ConfigError
