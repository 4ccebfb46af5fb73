"""Stage 2: copies a config into the names and forms that the schema has.

Fields say which other names they have (`Verdict.names`, `old_names`); DeepSpeed's old shorthands are here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from hf_zero.config.draft import Draft, value_in
from hf_zero.config.errors import ABSENT, Edit, Finding, Problem, Remark, key_path
from hf_zero.config.schema.fields import Section, subsection, verdict_of
from hf_zero.config.schema.whole import schema_for
from hf_zero.config.sources import MAX_DEPTH, is_auto
from hf_zero.config.views import Views

ZERO = "zero_optimization"
_SHORTHANDS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


def rename(raw: Mapping[str, Any], views: Views) -> Draft:
    """Return the first draft of a config."""
    findings: list[Finding] = []
    tree: dict[str, Any] = dict(_items(raw, "", (), findings))
    names = _Names(tree)
    names.rename()
    return Draft(raw=raw, views=views, tree=tree, renamed=names.renamed, findings=(*findings, *names.findings))


def _items(
    mapping: Mapping[Any, Any], path: str, around: tuple[int, ...], findings: list[Finding]
) -> Iterator[tuple[str, Any]]:
    around = (*around, id(mapping))
    for key, value in mapping.items():
        if isinstance(key, str):
            yield key, _copied(value, key_path(path, key), around, findings)
        else:
            findings.append(Problem(path or "config", key, "keys must be text", "put the key in quotes"))


def _copied(value: object, path: str, around: tuple[int, ...], findings: list[Finding]) -> object:
    """Copy a value. `around` has the ids of the enclosing containers, because a Python dict may contain itself."""
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if len(around) > MAX_DEPTH or id(value) in around:
        rule = f"nested in itself, or more than {MAX_DEPTH} levels deep"
        findings.append(Problem(path, ABSENT, rule, "flatten it"))
        return None
    if isinstance(value, Mapping):
        return dict(_items(value, path, around, findings))
    around = (*around, id(value))
    return [_copied(entry, f"{path}[{index}]", around, findings) for index, entry in enumerate(value)]


class _Names:
    """Renames the keys of a tree in place."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree
        self.findings: list[Finding] = []
        self.renamed: dict[str, str] = {}  # new path -> old path

    def rename(self) -> None:
        self._zero_as_flag()
        zero = self.tree.get(ZERO)
        if isinstance(zero, dict):
            for old, new in _SHORTHANDS.items():
                self._shorthand(zero, old, new)
            self._nested_aio(zero)
        for section, old, new, kind in other_names(schema_for(self.tree)[0]):
            holder = value_in(self.tree, section)
            if isinstance(holder, dict) and old in holder:
                self._move(holder, ".".join(section), old, new, kind)
        if self.tree.get("amp") is False:
            del self.tree["amp"]  # false is a shorthand for disabled

    def _zero_as_flag(self) -> None:
        zero, size = self.tree.get(ZERO), self.tree.get("allgather_size", "auto")
        if isinstance(zero, bool):
            zero = self.tree[ZERO] = {"stage": int(zero)}
            text = f"the old form {str(bool(zero['stage'])).lower()} means stage {zero['stage']}"
            self.findings.append(Remark(ZERO, text, edit=Edit((ZERO,), value=dict(zero))))
            if not is_auto(size):
                zero["allgather_bucket_size"] = self.tree.pop("allgather_size")
        elif not is_auto(size):
            rule, fix = "belongs to the old form zero_optimization: true", f"use {ZERO}.allgather_bucket_size"
            edit = Edit(("allgather_size",), to=(ZERO, "allgather_bucket_size"))
            self.findings.append(Problem("allgather_size", self.tree.pop("allgather_size"), rule, fix, edit=edit))

    def _shorthand(self, zero: dict[str, Any], old: str, new: str) -> None:
        wanted = zero.get(old, "auto")
        if wanted is True:
            zero[old] = {"device": "cpu"}
            self._move(zero, ZERO, old, new, "old", written=True)
        elif not is_auto(wanted):
            del zero[old]
            if wanted is not None and wanted is not False:
                fix = f'correct it, or remove it; the new form is {new}: {{"device": "cpu"}}'
                self.findings.append(
                    Problem(f"{ZERO}.{old}", wanted, "must be true or false (it is the old name)", fix)
                )

    def _nested_aio(self, zero: dict[str, Any]) -> None:
        if is_auto(zero.get("aio", "auto")):
            return
        nested = zero.pop("aio")
        if self.tree.get("aio"):
            rule = "aio belongs at the top level, where it is also given"
            edit = Edit((ZERO, "aio"))
            self.findings.append(Problem(f"{ZERO}.aio", nested, rule, "keep only the top-level aio", edit=edit))
        else:
            self.tree["aio"], self.renamed["aio"] = nested, f"{ZERO}.aio"
            text = "read as the top-level section aio, where it belongs"
            self.findings.append(Remark(f"{ZERO}.aio", text, edit=Edit((ZERO, "aio"), to=("aio",))))

    def _move(self, holder: dict[str, Any], around: str, old: str, new: str, kind: str, written: Any = ABSENT) -> None:
        value, (before, after) = holder.pop(old), (key_path(around, old), key_path(around, new))
        if holder.get(new) is None:
            holder[new], self.renamed[after] = value, before
            edit = Edit(tuple(before.split(".")), to=tuple(after.split(".")), value=value)
            self.findings.append(Remark(before, f"{kind} name, read as {after}", edit=edit))
        elif not is_auto(value) and not (isinstance(value, dict) and value == holder[new] and written is ABSENT):
            rule, value = f"is the {kind} name of {after}, which is given too", value if written is ABSENT else written
            edit = Edit.at(before)
            self.findings.append(Problem(before, value, rule, f"keep only {new}", edit=edit))


@functools.cache
def other_names(
    schema: type[Section], around: tuple[str, ...] = ()
) -> tuple[tuple[tuple[str, ...], str, str, str], ...]:
    """Return the path of the section, the other name, the name and "old" or "other", for all names of a schema."""
    names = []
    for name, field in schema.model_fields.items():
        verdict, below = verdict_of(field), subsection(field)
        names += [(around, old, name, "other") for old in verdict.names]
        names += [(around, old, name, "old") for old in verdict.old_names]
        names += () if below is None else other_names(below, (*around, name))
    return tuple(names)
