"""Looking keys up by name: which section holds what, and which key was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from hf_zero.config.schema.fields import Section, Verdict, subsection

_FEW = 12  # as many names as a message may list
_SEVERAL = 3  # as many places as a message may offer


def section_of(root: type[Section], path: Iterable[str]) -> type[Section] | None:
    """The section class at a path, or None if the schema has none there."""
    section: type[Section] | None = root
    by_name: type[Section] | None = None  # of a field that holds sections by names that the author chooses
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
    """The section class of a field dict[str, section]."""
    if get_origin(field.annotation) is not dict:
        return None
    inner = get_args(field.annotation)[1]
    return inner if isinstance(inner, type) and issubclass(inner, Section) else None


def verdict_of(field: FieldInfo) -> Verdict:
    """What setting this field does."""
    assert isinstance(field.json_schema_extra, dict), "every field of a section is made by supported, ignored, ..."
    return Verdict.model_validate(field.json_schema_extra)


def all_paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Every key path of the schema, sections included; `*` stands for a name that the author chooses."""
    for name, field in section.model_fields.items():
        yield prefix + name
        below = subsection(field)
        if below is not None:
            yield from all_paths(below, f"{prefix}{name}.*." if named_sections(field) else f"{prefix}{name}.")


@dataclass(frozen=True, slots=True)
class Resemblance:
    """Which known key an unknown one was probably meant to be: a sibling spelled alike, or the same name elsewhere."""

    sibling: str = ""
    elsewhere: tuple[str, ...] = ()  # paths

    def __bool__(self) -> bool:
        return bool(self.sibling or self.elsewhere)

    def words(self, siblings: Sequence[str]) -> str:
        """The fix to tell."""
        if self.sibling:
            return f'did you mean "{self.sibling}"?'
        if self.elsewhere:
            return f"did you mean {' or '.join(self.elsewhere)}?"
        few = ", ".join(siblings) if len(siblings) <= _FEW else ""
        return f"remove it, or write one of {few}" if few else "remove it; no key is spelled like it"


# What Trainer and other libraries call a key of ours.
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
    """What an unknown key resembles, among its siblings first."""
    known = {name.lower(): name for name in siblings}
    if _MEANT.get(key.lower()) in known:
        return Resemblance(sibling=_MEANT[key.lower()])
    close = difflib.get_close_matches(key.lower()[:100], known, n=1, cutoff=0.7)
    # "tetha": letters that have changed places count twice for difflib.
    close = close or [name for name in known if sorted(name) == sorted(key.lower())]
    if close:
        return Resemblance(sibling=known[close[0]])
    elsewhere = tuple(path for path in everywhere if path.rpartition(".")[2] == key)
    return Resemblance(elsewhere=elsewhere if len(elsewhere) <= _SEVERAL else ())


def leading_paths(root: type[Section]) -> tuple[str, ...]:
    """The key paths that somebody may be led to: not into Apex's section, nor into our own."""
    return tuple(path for path in all_paths(root) if not path.startswith(("amp.", "hf_zero.")))
