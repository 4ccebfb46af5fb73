"""Stage 4: makes typed sections of the values, with a finding in the author's terms for every invalid key."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hf_zero.config.draft import Draft, value_in
from hf_zero.config.errors import Edit, Finding, Problem, Remark, show
from hf_zero.config.extras import is_section
from hf_zero.config.schema.fields import Section, Verdict, all_paths, section_of, subsection, verdict_of
from hf_zero.config.schema.whole import schema_for, sections_in, whole_schema
from hf_zero.config.sources import dotted

# Sections in which programs store their own values, which DeepSpeed ignores. The keys of its other sections are known,
# so an unknown key there is a mistake.
_LOOSE = {"", "checkpoint"}
_COMMENT_MARKS = ("_", "//", "#", "$")
_ROUNDS = 20  # every round removes the invalid keys; at most the depth of the config plus one are needed
_FEW = 12  # the most names in a message
_SEVERAL = 3  # the most places in a message


def validate(draft: Draft) -> Draft:
    """Return the draft with its typed config, which lacks invalid keys, and with a finding for each of those."""
    tree = _own_sections(draft.tree)
    drop_null_sections(tree)
    schema, missing = schema_for(tree)
    findings: list[Finding] = [*missing]
    invalid = set[str]()
    for problem in missing:
        _remove(tree, problem.path.split("."))
    ignores_unknown = str(value_in(tree, ("hf_zero", "ignore_unknown_keys"))).lower() == "true"
    for _ in range(_ROUNDS):
        try:
            config = schema.model_validate(tree)
            # An invalid value also differs from one that is stated elsewhere.
            before = (one for one in draft.findings if not (isinstance(one, Problem) and one.path in invalid))
            return dataclasses.replace(draft, findings=(*before, *findings), config=config)
        except ValidationError as error:
            failed = error.errors(include_url=False, include_context=True, include_input=False)
            located = {_inside(tree, entry["loc"]): entry for entry in failed}
        findings += [_worded(path, tree, entry, ignores_unknown) for path, entry in located.items()]
        invalid |= set(map(dotted, located))
        for path in located:
            _remove(tree, path)
    raise AssertionError("every round removes a key, and the config is finite")


def _own_sections(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tree from which keys can be removed: the sections are copied."""
    return {key: _own_sections(value) if isinstance(value, dict) else value for key, value in tree.items()}


def drop_null_sections(tree: dict[str, Any]) -> None:
    """Remove null sections in place, because null means absent."""
    for path in [path for path, value in sections_in(tree) if value is None]:
        _remove(tree, path.split("."))
    _drop_null(tree, schema_for(tree)[0])


def _drop_null(tree: dict[str, Any], section: type[Section]) -> None:
    for name, field in section.model_fields.items():
        below = subsection(field)
        if below is not None and isinstance(tree.get(name), dict):
            _drop_null(tree[name], below)
        elif below is not None and tree.get(name, ...) is None:
            del tree[name]


def _inside(tree: object, location: Sequence[str | int]) -> tuple[str | int, ...]:
    """Return the part of pydantic's location that exists in the tree (unions add extra steps)."""
    path: list[str | int] = []
    for step in location:
        if isinstance(tree, dict) and step in tree or isinstance(tree, list) and isinstance(step, int):
            path.append(step)
            tree = tree[step]  # type: ignore[index]
    return tuple(path)


def _at(tree: Any, path: Sequence[str | int]) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def _remove(tree: dict[str, Any], path: Sequence[str | int]) -> None:
    """Remove an invalid value, together with any list around it."""
    last = max(index for index, step in enumerate(path) if isinstance(step, str))
    _at(tree, path[:last]).pop(path[last], None)  # two entries of one list may both have failed


def _worded(path: Sequence[str | int], tree: object, entry: ErrorDetails, ignores_unknown: bool) -> Finding:
    value, name, keys = _at(tree, path), dotted(tuple(path)), tuple(map(str, path))
    if entry["type"] == "extra_forbidden":
        return _unknown_key(keys, value, _at(tree, path[:-1]), ignores_unknown)
    if isinstance(value, str) and value.strip().lower() == "auto":
        rule = '"auto" is written in lower case and without spaces'
        return Problem(name, value, rule, 'write "auto"', edit=Edit(keys, value="auto"))
    names = [step for step in path if isinstance(step, str)]
    section = section_of(whole_schema(), names[:-1])
    field = section.model_fields.get(names[-1]) if section else None
    if field is None:
        return Problem(name, value, _rule(entry), "correct the value")
    verdict: Verdict = verdict_of(field)
    edit = None
    if subsection(field) is not None:
        example = _example(section_of(whole_schema(), names), value)
        edit = Edit(keys, value=example) if example else None
        shown = json.dumps(example) if example else "{...}, for example {}"
        fix = f"write {shown}, or remove the key ({field.description})"
    else:
        default = "" if field.default is None else f" (default {_json(field.default)})"
        fix = f"correct it, or remove the key{default}. Meaning: {field.description}"
    words = verdict.words.format(value=show(value)) if verdict.words_for in ("", entry["type"]) else ""
    return Problem(name, value, _rule(entry), fix, edit=edit, raises=verdict.raises, words=words)


def _rule(entry: ErrorDetails) -> str:
    context, kind = entry.get("ctx", {}), entry["type"]
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"must be {context['expected']}"
    return {
        "greater_than_equal": f"must be at least {context.get('ge')}",
        "less_than_equal": f"must be at most {context.get('le')}",
        "greater_than": f"must be more than {context.get('gt')}",
        "string_type": "must be text",
        "list_type": "must be a list",
        "int_type": "must be a whole number",
        **dict.fromkeys(("model_type", "dict_type", "model_attributes_type"), "must be an object {...}"),
    }.get(kind, entry["msg"])


def _example(section: type[Section] | None, value: object) -> dict[str, object]:
    """Return the section that the author of this value probably meant; empty if there is none."""
    fields = section.model_fields if section is not None else {}
    kinds = {"enabled": bool, "stage": int, "device": str, "type": str}
    key = next((key for key, kind in kinds.items() if key in fields and type(value) is kind), None)
    return {} if key is None else {key: value}


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def _unknown_key(path: tuple[str, ...], value: object, around: Collection[str], ignores_unknown: bool) -> Finding:
    """Return the finding for an unknown key. In some places it is ignored with a remark, unless it resembles a known
    key."""
    *parents, key = path
    schema, name = whole_schema(), dotted(path)
    if not parents:
        if key.startswith(_COMMENT_MARKS):
            return Remark(name, "taken as a remark")
        inner = section_of(schema, key.split(".")[:-1]) if "." in key else None
        if inner is not None and key.rpartition(".")[2] in inner.model_fields:  # TRL writes such keys
            text = "a dotted key at the top level has no effect (a nested key of that name has)"
            return Remark(key, text, edit=Edit(path))
        if ignores_unknown and not is_section(key):
            text = "there is no such key; ignored (hf_zero.ignore_unknown_keys)"
            return Remark(name, text, edit=Edit(path))
    section = section_of(schema, parents)
    siblings = [sibling for sibling in section.model_fields if parents or sibling != "hf_zero"] if section else []
    # The names of our own settings are not suggested for DeepSpeed's, nor those of Apex.
    everywhere = [known for known in all_paths(schema) if not known.startswith(("amp.", "hf_zero."))]
    alike = _resemblance(key, siblings, () if parents == ["hf_zero"] else everywhere)
    rule = "there is no such key " + (f"in {'.'.join(parents)}" if parents else "at the top level")
    if alike.sibling in around:
        fix = f"keep only {alike.sibling}, which was probably meant and is given, too"
        return Problem(name, value, rule, fix, edit=Edit(path), words=section.unknown_words if section else "")
    edit = alike.edit(path)
    if ".".join(parents) in _LOOSE and not alike and "." not in key:
        return Remark(name, f"{rule}; ignored", value, ignored=True, edit=edit)
    words = section.unknown_words if section is not None else ""
    return Problem(name, value, rule, alike.words(siblings), edit=edit, words=words)


@dataclass(frozen=True, slots=True)
class _Resemblance:
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

    def edit(self, path: tuple[str, ...]) -> Edit | None:
        if self.sibling:
            return Edit(path, to=(*path[:-1], self.sibling))
        if len(self.elsewhere) > 1:
            return None
        return Edit(path, to=tuple(self.elsewhere[0].split("."))) if self.elsewhere else Edit(path)


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


def _resemblance(key: str, siblings: Iterable[str], everywhere: Sequence[str]) -> _Resemblance:
    """Return the known key that an unknown one resembles, trying its siblings first."""
    known = {name.lower(): name for name in siblings}
    if _MEANT.get(key.lower()) in known:
        return _Resemblance(sibling=_MEANT[key.lower()])
    close = difflib.get_close_matches(key.lower()[:100], known, n=1, cutoff=0.7)
    # difflib counts transposed letters twice, as in "tetha".
    close = close or [name for name in known if sorted(name) == sorted(key.lower())]
    if close:
        return _Resemblance(sibling=known[close[0]])
    elsewhere = tuple(path for path in everywhere if path.rpartition(".")[2] == key)
    return _Resemblance(elsewhere=elsewhere if len(elsewhere) <= _SEVERAL else ())
