"""Config fields: value types that accept several spellings, and the verdict (effect) of each field."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from hf_zero.config.rules import AnyRule

Kind = Literal["supported", "ignored", "unsupported", "detail", "check"]
ALL_STAGES = (0, 1, 2, 3)
LARGEST = 2**63 - 1
S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """One object of the config. Unknown keys are errors.

    Attributes:
        rules: the rules about its keys and those of other sections, in the order in which they are checked.
        unknown_words: the words of DeepSpeed's error for an unknown key in it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, protected_namespaces=())
    rules: ClassVar[tuple[AnyRule, ...]] = ()
    unknown_words: ClassVar[str] = ""

    def section(self, kind: type[S]) -> S:
        """Return the section of this class in or below this one, or its defaults if there is none.

        `kind` may be a base class of a section, so that keys of several owners can share one section.
        """
        if isinstance(self, kind):
            return self
        path = _path_to(type(self), kind)
        return kind() if path is None else self.at(path)

    def at(self, path: Iterable[str]) -> Any:
        """Return the value of a key below this section. A section that is not given has its defaults."""
        value: Any = self
        for name in path:
            kind: type[Section] = type(value)
            below = _subsections(kind)[name]
            value = getattr(value, name)
            if value is None and below is not None:
                value = below()
        return value

    def has(self, path: Iterable[str]) -> bool:
        """Whether the config has the key at a path below this section."""
        value: Any = self
        for name in path:
            if not isinstance(value, Section) or name not in value.model_fields_set:
                return False
            value = getattr(value, name)
        return True

    def given(self) -> dict[str, Any]:
        """Return the keys that the config has, as plain values."""
        return self.model_dump(exclude_unset=True)


class StrictSection(Section):
    """A section whose keys DeepSpeed checks, too."""

    unknown_words = "Extra inputs are not permitted"


@functools.cache
def _path_to(section: type[Section], kind: type[Section]) -> tuple[str, ...] | None:
    """Return the keys from a section to the first nested section of the given class or a subclass."""
    for name, below in _subsections(section).items():
        path = None if below is None else () if issubclass(below, kind) else _path_to(below, kind)
        if path is not None:
            return (name, *path)
    return None


@functools.cache
def _subsections(section: type[Section]) -> dict[str, type[Section] | None]:
    return {name: subsection(field) for name, field in section.model_fields.items()}


def subsection(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a field, or None if the field is not a section."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def named_sections(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a field of type dict[str, section], or None."""
    if get_origin(field.annotation) is not dict:
        return None
    inner = get_args(field.annotation)[1]
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def section_of(root: type[Section], path: Iterable[str]) -> type[Section] | None:
    """Return the section class at a path, or None if there is none."""
    section: type[Section] | None = root
    by_name: type[Section] | None = None  # section class of a field with user-chosen names
    for key in path:
        if by_name is not None:
            section, by_name = by_name, None
            continue
        if section is None or key not in section.model_fields:
            return None
        by_name = named_sections(section.model_fields[key])
        section = subsection(section.model_fields[key])
    return section


def all_paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield every key path of the schema, including sections; `*` stands for a user-chosen name."""
    for name, field in section.model_fields.items():
        yield prefix + name
        below = subsection(field)
        if below is not None:
            yield from all_paths(below, f"{prefix}{name}.*." if named_sections(field) else f"{prefix}{name}.")


@functools.cache
def rules_of(schema: type[Section]) -> tuple[AnyRule, ...]:
    """Return the rules of a schema: those of a section follow those of the sections in it."""
    below = [kind for kind in _subsections(schema).values() if kind is not None]
    return tuple(dict.fromkeys([*(rule for kind in below for rule in rules_of(kind)), *schema.rules]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The effect of setting a field. It is part of the schema, so that documentation and checks agree.

    Attributes:
        why: ignored: why it has no effect; unsupported: what is missing; supported: shown where it has no effect.
        stages: the field has no effect at other stages.
        beside: a key of the same section, and its values with which the field has an effect.
        switch: unsupported section: key that turns it on; "": any content; None: presence.
        met: although the field has no effect, what it requests is always the case.
        names: other names that DeepSpeed has for the key.
        old_names: names of former versions.
        raises, words: type and words of DeepSpeed's error for an invalid value.
        words_for: what is wrong with a value in these words, as a type of pydantic's errors; default: anything.
    """

    kind: Kind
    why: str = ""
    stages: tuple[int, ...] = ALL_STAGES
    beside: tuple[str, tuple[str, ...]] | None = None
    unit: str = ""
    switch: str | None = "enabled"
    met: bool = False
    names: tuple[str, ...] = ()
    old_names: tuple[str, ...] = ()
    raises: type[Exception] | None = None
    words: str = ""
    words_for: str = ""


def _field(kind: Kind, default: Any, doc: str, **verdict: Any) -> Any:
    extra: Any = {"verdict": Verdict(kind=kind, **verdict)}
    return Field(default, description=doc, validate_default=False, json_schema_extra=extra)


def verdict_of(field: FieldInfo) -> Verdict:
    assert isinstance(field.json_schema_extra, dict), "every field of a section is made by supported, ignored, ..."
    verdict: Any = field.json_schema_extra["verdict"]
    return verdict  # type: ignore[no-any-return]


# A field is made by one of these, with its default, its meaning and what `Verdict` has.
supported = partial(_field, "supported")  # it has an effect
ignored = partial(_field, "ignored")  # accepted without effect, for the reason `why`; the user is told when it is set
unsupported = partial(_field, "unsupported")  # refused unless it has its default (a section: unless it is off)
detail = partial(_field, "detail")  # belongs to another field and has no verdict of its own
check = partial(_field, "check")  # only compared with other settings, by rules


def as_whole(value: object) -> int:
    """Parse a whole number: 8, 8.0, 5e8 and "5e8", but not true, 8.5, inf or "eight"."""
    number = _number(value, "must be a whole number")
    if isinstance(number, float):
        if not number.is_integer():  # nor are NaN and infinity
            raise ValueError("must be a whole number")
        number = int(number)
    if abs(number) > LARGEST:
        raise ValueError(f"must be a whole number no larger than {LARGEST}")
    return number


def as_size(value: object) -> int:
    """Parse a number of elements. Fractions are truncated, as in 0.9 * hidden_size ** 2."""
    number = _number(value, "must be a whole number")
    if isinstance(number, float) and 1.0 <= number <= LARGEST:  # not NaN, and not something that becomes "off"
        return as_whole(math.floor(number))
    return as_whole(number)


def as_number(value: object) -> float:
    """Parse a finite number, which may be text ("1e-3")."""
    try:
        number = float(_number(value, "must be a number"))
    except OverflowError:
        raise ValueError("must be a finite number") from None
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    return number


def _number(value: object, rule: str) -> int | float:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, (numbers.Real, str)):
        raise ValueError(rule)
    try:
        return int(value) if isinstance(value, str) and value.strip().isdecimal() else float(value)
    except (ValueError, OverflowError):
        raise ValueError(rule) from None


def as_lower(value: object) -> object:
    """Convert text to lower case; return other values unchanged."""
    return value.lower() if isinstance(value, str) else value


def as_flag(value: object) -> bool:
    """Parse true or false, which may be text in any case."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError("must be true or false")


def as_free(value: object) -> dict[str, Any]:
    """Parse a section without checking its keys; false and null mean that it is off."""
    if value is False or value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("must be an object {...}")
    return value


DTYPE_SPELLINGS = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def as_dtype(value: object) -> object:
    """Parse fp32, fp16 or bf16 in any case; the error suggests the nearest name."""
    if value is None:
        return None
    name = as_lower(value)
    if name in ("fp32", "fp16", "bf16"):
        return name
    meant = DTYPE_SPELLINGS.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    raise ValueError('must be "fp32", "fp16" or "bf16"' + (f'; did you mean "{meant}"?' if meant else ""))


def as_path(value: object) -> object:
    return str(value) if hasattr(value, "__fspath__") else value


def as_names(value: object) -> object:
    """Parse a list of names; a single name is a list of one."""
    return [value] if isinstance(value, str) else value


def whole_or(*words: str, unit: str) -> Callable[[object], object]:
    """Return a parser of a whole number, 1 or more, or one of some words in any case."""

    def parse(value: object) -> object:
        if as_lower(value) in words:
            return as_lower(value)
        try:
            number = as_whole(value)
        except ValueError:
            number = 0
        if number < 1:
            parts = [f"must be a number of {unit}, 1 or more", *(f'"{word}"' for word in words)]
            raise ValueError(", ".join(parts[:-1]) + ("," if len(words) == 1 else "") + f" or {parts[-1]}")
        return number

    return parse


def fraction_or(word: str) -> Callable[[object], object]:
    """Return a parser for a number from 0 to 1, or this word."""

    def parse(value: object) -> object:
        if value == word:
            return word
        try:
            number = as_number(value)
        except ValueError:
            number = -1.0
        if not 0 <= number <= 1:
            raise ValueError(f'must be a number from 0 to 1, or "{word}"')
        return number

    return parse


DtypeName = Literal["fp32", "bf16", "fp16"]
Flag = Annotated[bool, BeforeValidator(as_flag)]
Whole = Annotated[int, BeforeValidator(as_whole)]
Count = Annotated[int, BeforeValidator(as_whole), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(as_whole), Field(ge=1)]
Size = Annotated[int, BeforeValidator(as_size), Field(ge=0)]
PositiveSize = Annotated[int, BeforeValidator(as_size), Field(ge=1)]
Number = Annotated[float, BeforeValidator(as_number)]
NonNegative = Annotated[float, BeforeValidator(as_number), Field(ge=0)]
PositiveNumber = Annotated[float, BeforeValidator(as_number), Field(gt=0)]
Fraction = Annotated[float, BeforeValidator(as_number), Field(ge=0, le=1)]
Dtype = Annotated[DtypeName, BeforeValidator(as_dtype)]
Free = Annotated[dict[str, Any], BeforeValidator(as_free)]
PathText = Annotated[str, BeforeValidator(as_path)]
Names = Annotated[list[str], BeforeValidator(as_names)]
