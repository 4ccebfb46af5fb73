"""Looking keys up by name: which section holds what, and which key was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

from pydantic.fields import FieldInfo

from hf_zero.config.schema.fields import Section, Verdict

_FEW = 12  # as many names as a message may list


def subsection(field: FieldInfo) -> type[Section] | None:
    """The section class of a field that holds one."""
    for candidate in (field.annotation, *get_args(field.annotation)):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def section_of(root: type[Section], path: Iterable[str]) -> type[Section] | None:
    """The section class at a path, or None if the schema has none there."""
    section: type[Section] | None = root
    for key in path:
        if section is None or key not in section.model_fields:
            return None
        section = subsection(section.model_fields[key])
    return section


def verdict_of(field: FieldInfo) -> Verdict:
    """What setting this field does."""
    assert isinstance(field.json_schema_extra, dict), "every field of a section is made by honoured, inert, ..."
    return Verdict.model_validate(field.json_schema_extra)


def all_paths(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Every key path of the schema, sections included."""
    for name, field in section.model_fields.items():
        yield prefix + name
        below = subsection(field)
        if below is not None:
            yield from all_paths(below, f"{prefix}{name}.")


def suggestion(key: str, siblings: Iterable[str], everywhere: Sequence[str]) -> str:
    """The fix for an unknown key: a sibling spelled alike, or the same name in another section."""
    known = {name.lower(): name for name in siblings}
    close = difflib.get_close_matches(key.lower()[:100], known, n=1, cutoff=0.7)
    if close:
        return f'did you mean "{known[close[0]]}"?'
    # Apex's section shares names with fp16, and nobody is led there.
    elsewhere = [path for path in everywhere if path.rpartition(".")[2] == key and not path.startswith("amp.")]
    if 1 <= len(elsewhere) <= 3:
        return f"did you mean {' or '.join(elsewhere)}?"
    few = ", ".join(known.values()) if len(known) <= _FEW else ""
    return f"remove it, or write one of {few}" if few else "remove it; no key is spelled like it"
