"""Check a translated tree against the schema, and word every complaint for the person who wrote the config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hf_zero.config.errors import Edit, Problem, Remark
from hf_zero.config.extras import schema_for, sections_in, whole_schema
from hf_zero.config.schema import Root, Section
from hf_zero.config.schema.fields import Resemblance, leading_paths, resemblance, section_of, subsection
from hf_zero.config.sources import dotted

# Where programs leave notes of their own, which DeepSpeed passes over. Its other sections have known keys, whether it
# reads them all or one by one: a key that none of them is was meant to do something.
_LOOSE = {"", "checkpoint"}
_ROUNDS = 20  # every round removes what failed; a round more than the deepest section is enough


def validate(tree: dict[str, Any]) -> tuple[Root, list[Problem | Remark]]:
    """The typed config without the keys that failed, and a finding for each of those."""
    drop_null_sections(tree)
    schema, missing = schema_for(tree)
    problems: list[Problem | Remark] = [*missing]
    for problem in missing:
        _remove(tree, problem.path.split("."))
    for _ in range(_ROUNDS):
        try:
            return schema.model_validate(tree), problems
        except ValidationError as error:
            failed = error.errors(include_url=False, include_context=True, include_input=False)
            located = {_inside(tree, entry["loc"]): entry for entry in failed}
        problems += [_worded(path, _at(tree, path), entry) for path, entry in located.items()]
        for path in located:
            _remove(tree, path)
    raise AssertionError("validation does not settle")


def drop_null_sections(tree: dict[str, Any]) -> None:
    """A section that is null is as good as absent; takes them out, in place."""
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
    """The part of pydantic's location that exists in the tree (unions add steps of their own)."""
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
    """Take the failed value out, together with any list around it."""
    last = max(index for index, step in enumerate(path) if isinstance(step, str))
    _at(tree, path[:last]).pop(path[last], None)  # two entries of one list may both have failed


def _worded(path: Sequence[str | int], value: object, entry: ErrorDetails) -> Problem | Remark:
    name = dotted(tuple(path))
    if entry["type"] == "extra_forbidden":
        return unknown_key([str(step) for step in path], value)
    if isinstance(value, str) and value.strip().lower() == "auto":
        edit = Edit(tuple(map(str, path)), value="auto")
        return Problem(name, value, '"auto" is written in lower case', 'write "auto"', edit=edit)
    return Problem(name, value, _rule(entry), _fix(path, value))


def unknown_key(path: Sequence[str], value: object) -> Problem | Remark:
    """The finding for a key that no section has: in some places it is ignored, with a remark, unless it looks like a
    key that we know."""
    *parents, key = path
    schema = whole_schema()
    section = section_of(schema, parents)
    siblings = [name for name in section.model_fields if parents or name != "hf_zero"] if section else []
    where = f"in {'.'.join(parents)}" if parents else "at the top level"
    # What our own settings are called says nothing about DeepSpeed's.
    alike = resemblance(key, siblings, () if parents == ["hf_zero"] else leading_paths(schema))
    rule, edit, name = f"there is no such key {where}", _renamed(path, alike), dotted(tuple(path))
    if ".".join(parents) in _LOOSE and not alike and "." not in key:
        return Remark(name, f"{rule}; ignored", value, ignored=True, edit=edit)
    return Problem(name, value, rule, alike.words(siblings), edit=edit)


def _renamed(path: Sequence[str], alike: Resemblance) -> Edit | None:
    *parents, _ = path
    if alike.sibling:
        return Edit(tuple(path), to=(*parents, alike.sibling))
    if len(alike.elsewhere) > 1:
        return None
    return Edit(tuple(path), to=tuple(alike.elsewhere[0].split("."))) if alike.elsewhere else Edit(tuple(path))


def _rule(entry: ErrorDetails) -> str:
    context = entry.get("ctx", {})
    kind = entry["type"]
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind in ("greater_than_equal", "less_than_equal"):
        return f"must be at {'least' if kind[0] == 'g' else 'most'} {context.get('ge', context.get('le'))}"
    if kind in ("model_type", "dict_type", "model_attributes_type"):
        return "must be an object {...}"
    if kind == "greater_than":
        return f"must be more than {context.get('gt')}"
    plain = {"string_type": "must be text", "list_type": "must be a list", "int_type": "must be a whole number"}
    return plain.get(kind, entry["msg"])


def _fix(path: Sequence[str | int], value: object) -> str:
    names = [step for step in path if isinstance(step, str)]
    section = section_of(whole_schema(), names[:-1])
    field = section.model_fields.get(names[-1]) if section else None
    if field is None:
        return "correct the value"
    if subsection(field) is not None:
        return f"write {_example(section_of(whole_schema(), names), value)}, or remove the key ({field.description})"
    default = "" if field.default is None else f" (default {_json(field.default)})"
    return f"correct it, or remove the key{default}. Meaning: {field.description}"


def _example(section: type[Section] | None, value: object) -> str:
    """The section that the author of this value probably meant."""
    fields = section.model_fields if section is not None else {}
    kinds = {"enabled": bool, "stage": int, "device": str, "type": str}
    key = next((key for key, kind in kinds.items() if key in fields and type(value) is kind), None)
    return "{...}, for example {}" if key is None else json.dumps({key: value})


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
