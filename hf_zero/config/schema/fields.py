"""Config fields: value types that accept several spellings, and the verdict (effect) of each field."""

from __future__ import annotations

import difflib
import functools
import math
import numbers
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

Kind = Literal["supported", "ignored", "unsupported", "detail", "check"]
ALL_STAGES = (0, 1, 2, 3)
LARGEST = 2**63 - 1
S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """One object of the config. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, protected_namespaces=())

    def section(self, kind: type[S]) -> S:
        """Return the section of this class in or below this one, or its defaults if there is none.

        `kind` may be a base class of a section, so that keys of several owners can share one section.
        """
        if isinstance(self, kind):
            return self
        section: Any = self
        for name in _path_to(type(self), kind) or ():
            section = getattr(section, name, None)
        return kind() if section is None else section


@functools.cache
def _path_to(section: type[Section], kind: type[Section]) -> tuple[str, ...] | None:
    """Return the keys from a section to the first nested section of the given class or a subclass."""
    for name, field in section.model_fields.items():
        below = subsection(field)
        path = None if below is None else () if issubclass(below, kind) else _path_to(below, kind)
        if path is not None:
            return (name, *path)
    return None


def subsection(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a field, or None if the field is not a section."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


class Verdict(BaseModel):
    """The effect of setting a field. It is part of the schema, so that documentation and checks agree."""

    kind: Kind
    why: str = ""  # ignored: why it has no effect; unsupported: what is missing
    stages: tuple[int, ...] = ALL_STAGES  # the field has no effect at other stages
    unit: str = ""
    switch: str | None = "enabled"  # unsupported section: key that turns it on; "": any content; None: presence
    met: bool = False  # although the field has no effect, what it requests is always the case


def supported(
    default: Any, doc: str, *, why: str = "", unit: str = "", stages: tuple[int, ...] = ALL_STAGES, met: bool = False
) -> Any:
    """A field that has an effect; `why` is shown at stages where it has none."""
    return _field(default, doc, Verdict(kind="supported", why=why, unit=unit, stages=stages, met=met))


def ignored(
    default: Any, doc: str, *, why: str, unit: str = "", stages: tuple[int, ...] = ALL_STAGES, met: bool = False
) -> Any:
    """A field that is accepted without effect for the given reason; the user is told when the key is set."""
    return _field(default, doc, Verdict(kind="ignored", why=why, unit=unit, stages=stages, met=met))


def unsupported(default: Any, doc: str, *, why: str, switch: str | None = "enabled") -> Any:
    """A field that is refused unless it has its default value (for a section: unless it is switched off)."""
    return _field(default, doc, Verdict(kind="unsupported", why=why, switch=switch))


def detail(default: Any, doc: str) -> Any:
    """A field that belongs to another one and has no verdict of its own."""
    return _field(default, doc, Verdict(kind="detail"))


def check(default: Any, doc: str, *, unit: str = "") -> Any:
    """A field that is only compared with other settings, by the rules in `resolve`."""
    return _field(default, doc, Verdict(kind="check", unit=unit))


def _field(default: Any, doc: str, verdict: Verdict) -> Any:
    return Field(default, description=doc, validate_default=False, json_schema_extra=verdict.model_dump(mode="json"))


def as_whole(value: object) -> int:
    """Parse a whole number: 8, 8.0, 5e8 and "5e8", but not true, 8.5, inf or "eight"."""
    number = _number(value, "must be a whole number")
    if isinstance(number, int):
        whole = number
    elif math.isfinite(number) and number.is_integer():
        whole = int(number)
    else:
        raise ValueError("must be a whole number")
    if abs(whole) > LARGEST:
        raise ValueError(f"must be a whole number no larger than {LARGEST}")
    return whole


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
    if isinstance(value, bool):
        raise ValueError(rule)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, (numbers.Real, str)):
        return _parsed(value, rule)
    raise ValueError(rule)


def _parsed(value: numbers.Real | str, rule: str) -> int | float:
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
    name = value.lower() if isinstance(value, str) else value
    if name in ("fp32", "fp16", "bf16"):
        return name
    meant = DTYPE_SPELLINGS.get(name.removeprefix("torch.")) if isinstance(name, str) else None
    raise ValueError('must be "fp32", "fp16" or "bf16"' + (f'; did you mean "{meant}"?' if meant else ""))


def as_path(value: object) -> object:
    return str(value) if hasattr(value, "__fspath__") else value


def as_names(value: object) -> object:
    """Parse a list of names; a single name is a list of one."""
    return [value] if isinstance(value, str) else value


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
Dtype = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(as_dtype)]
Free = Annotated[dict[str, Any], BeforeValidator(as_free)]
PathText = Annotated[str, BeforeValidator(as_path)]
Names = Annotated[list[str], BeforeValidator(as_names)]


_FEW = 12  # the most names in a message
_SEVERAL = 3  # the most places in a message


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


def named_sections(field: FieldInfo) -> type[Section] | None:
    """Return the section class of a field of type dict[str, section], or None."""
    if get_origin(field.annotation) is not dict:
        return None
    inner = get_args(field.annotation)[1]
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def verdict_of(field: FieldInfo) -> Verdict:
    assert isinstance(field.json_schema_extra, dict), "every field of a section is made by supported, ignored, ..."
    return Verdict.model_validate(field.json_schema_extra)


def all_paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield every key path of the schema, including sections; `*` stands for a user-chosen name."""
    for name, field in section.model_fields.items():
        yield prefix + name
        below = subsection(field)
        if below is not None:
            yield from all_paths(below, f"{prefix}{name}.*." if named_sections(field) else f"{prefix}{name}.")


@dataclass(frozen=True, slots=True)
class Resemblance:
    """The known key probably meant by an unknown one: a sibling with a similar name, or the same name elsewhere."""

    sibling: str = ""
    elsewhere: tuple[str, ...] = ()  # paths

    def __bool__(self) -> bool:
        return bool(self.sibling or self.elsewhere)

    def words(self, siblings: Sequence[str]) -> str:
        """Return the fix for the message."""
        if self.sibling:
            return f'did you mean "{self.sibling}"?'
        if self.elsewhere:
            return f"did you mean {' or '.join(self.elsewhere)}?"
        few = ", ".join(siblings) if len(siblings) <= _FEW else ""
        return f"remove it, or write one of {few}" if few else "remove it; there is no similar key"


# Names of our keys in Trainer and other libraries.
_MEANT = {
    "max_grad_norm": "gradient_clipping",
    "grad_clip": "gradient_clipping",
    "max_norm": "gradient_clipping",
    "batch_size": "train_batch_size",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "lr_scheduler": "scheduler",
    "zero": "zero_optimization",
    "zero_stage": "stage",
}


def resemblance(key: str, siblings: Iterable[str], everywhere: Sequence[str]) -> Resemblance:
    """Return the known key that an unknown one resembles, trying its siblings first."""
    known = {name.lower(): name for name in siblings}
    if _MEANT.get(key.lower()) in known:
        return Resemblance(sibling=_MEANT[key.lower()])
    close = difflib.get_close_matches(key.lower()[:100], known, n=1, cutoff=0.7)
    # difflib counts transposed letters twice, as in "tetha".
    close = close or [name for name in known if sorted(name) == sorted(key.lower())]
    if close:
        return Resemblance(sibling=known[close[0]])
    elsewhere = tuple(path for path in everywhere if path.rpartition(".")[2] == key)
    return Resemblance(elsewhere=elsewhere if len(elsewhere) <= _SEVERAL else ())


def leading_paths(root: type[Section]) -> tuple[str, ...]:
    """Return the key paths that a fix may suggest, which excludes Apex's section and our own."""
    return tuple(path for path in all_paths(root) if not path.startswith(("amp.", "hf_zero.")))
