"""Translates old spellings and shorthands to the form of the schema, and validates the result, with messages for the
author of the config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from hf_zero.config.errors import ABSENT, ConfigError, Edit, Problem, Remark, key_path
from hf_zero.config.extras import is_section, schema_for, sections_in, whole_schema
from hf_zero.config.schema import Root, Section
from hf_zero.config.schema.fields import Resemblance, leading_paths, resemblance, section_of, subsection
from hf_zero.config.sources import MAX_DEPTH, dotted

_REMARK_MARKS = ("_", "//", "#", "$")
# DeepSpeed accepts these keys of zero_optimization under the names of its fields and under their aliases.
_FIELD_NAMES = (
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
    "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "allgather_sequential",
)  # fmt: skip
OLD_SPELLINGS = ("cpu_offload", "cpu_offload_param", "stage3_gather_fp16_weights_on_model_save")
# Accepted spelling -> canonical name.
ZERO_SPELLINGS = {
    **{name: f"stage3_{name}" for name in _FIELD_NAMES},
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
# For these keys, "auto" is a regular value.
_AUTO_IS_A_VALUE = ("data_types.keep_in_fp32_modules", "pipeline", "zero_optimization.zenflow")


@dataclass(slots=True)
class Translated:
    """The config in canonical form, with the findings of the translation."""

    tree: dict[str, Any]
    autos: set[str] = field(default_factory=set)  # paths that held a literal "auto"
    remarks: list[Remark] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)  # path in the tree -> original path


def translate(raw: Mapping[str, Any]) -> Translated:
    """Return a new tree without autos, old names and comment keys. Does not modify `raw`."""
    result = Translated(tree={})
    copied = _copy(raw, "", (), result)
    result.tree = copied if isinstance(copied, dict) else {}
    _drop_remarks(result)
    _drop_dotted(result)
    _legacy_zero(result)
    _nested_aio(result)
    _bfloat16(result)
    _tensor_parallel(result)
    if result.tree.get("amp") is False:
        del result.tree["amp"]  # false is a shorthand for disabled
    _drop_unknown(result)
    return result


def _copy(value: object, path: str, around: tuple[int, ...], result: Translated) -> object:
    """Copy a value. `around` has the ids of the enclosing containers, because a Python dict may contain itself."""
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if len(around) > MAX_DEPTH or id(value) in around:
        rule = f"nested in itself, or more than {MAX_DEPTH} levels deep"
        result.problems.append(Problem(path, ABSENT, rule, "flatten it"))
        return None
    around = (*around, id(value))
    if isinstance(value, Mapping):
        return dict(_copy_items(value, path, around, result))
    return [_copy(entry, f"{path}[{index}]", around, result) for index, entry in enumerate(value)]


def _copy_items(
    mapping: Mapping[Any, Any], path: str, around: tuple[int, ...], result: Translated
) -> Iterator[tuple[str, Any]]:
    for key, value in mapping.items():
        if not isinstance(key, str):
            result.problems.append(Problem(path or "config", key, "keys must be text", "put the key in quotes"))
            continue
        where = key_path(path, key)
        if isinstance(value, str) and value == "auto" and not _may_be_auto(where):
            result.autos.add(where)
            continue
        yield key, _copy(value, where, around, result)


def _may_be_auto(path: str) -> bool:
    return any(path == place or path.startswith(f"{place}.") for place in _AUTO_IS_A_VALUE)


def _drop_remarks(result: Translated) -> None:
    for key in [key for key in result.tree if key.startswith(_REMARK_MARKS)]:
        del result.tree[key]
        result.remarks.append(Remark(key_path("", key), "taken as a remark"))


def _drop_dotted(result: Translated) -> None:
    """Drop literal keys like "zero_optimization.reduce_bucket_size", which TRL writes and DeepSpeed ignores, too."""
    for key in [key for key in result.tree if "." in key]:
        *parents, name = key.split(".")
        section = section_of(whole_schema(), parents)
        if section is None or name not in section.model_fields:
            continue  # kept in the tree, so that the schema reports it
        del result.tree[key]
        text = "a dotted key at the top level has no effect (a nested key of that name has)"
        result.remarks.append(Remark(key, text, edit=Edit((key,))))


def _legacy_zero(result: Translated) -> None:
    zero = result.tree.get("zero_optimization")
    gather_size = result.tree.pop("allgather_size", None)
    if isinstance(zero, bool):
        zero = result.tree["zero_optimization"] = {"stage": int(zero)}
        text = f"the old form {str(bool(zero['stage'])).lower()} means stage {zero['stage']}"
        edit = Edit(("zero_optimization",), value=dict(zero))
        result.remarks.append(Remark("zero_optimization", text, edit=edit))
        if gather_size is not None:
            zero["allgather_bucket_size"] = gather_size
    elif gather_size is not None:
        rule = "belongs to the old form zero_optimization: true"
        result.problems.append(
            Problem("allgather_size", gather_size, rule, "use zero_optimization.allgather_bucket_size")
        )
    if isinstance(zero, dict):
        _rename_offload(zero, "cpu_offload", "offload_optimizer", result)
        _rename_offload(zero, "cpu_offload_param", "offload_param", result)
        for written, new in ZERO_SPELLINGS.items():
            if written in zero:
                _move(zero, written, new, zero[written], result)


def _rename_offload(zero: dict[str, Any], old: str, new: str, result: Translated) -> None:
    wanted = zero.get(old, ABSENT)
    if wanted is True:
        _move(zero, old, new, {"device": "cpu"}, result)
    elif wanted is False or wanted is None:
        del zero[old]
    elif wanted is not ABSENT:
        del zero[old]
        rule = "must be true or false (it is the old name)"
        result.problems.append(
            Problem(f"zero_optimization.{old}", wanted, rule, f'use {new}: {{"device": "cpu"}}, or remove it')
        )


def _move(zero: dict[str, Any], old: str, new: str, value: object, result: Translated) -> None:
    written, kind = zero.pop(old), "old" if old in OLD_SPELLINGS else "other"
    if zero.get(new) is not None:
        rule = f"is the {kind} name of zero_optimization.{new}, which is given too"
        result.problems.append(Problem(f"zero_optimization.{old}", written, rule, f"keep only {new}"))
        return
    zero[new] = value
    result.renamed[f"zero_optimization.{new}"] = f"zero_optimization.{old}"
    edit = Edit(("zero_optimization", old), to=("zero_optimization", new), value=value)
    text = f"{kind} name, read as zero_optimization.{new}"
    result.remarks.append(Remark(f"zero_optimization.{old}", text, edit=edit))


def _nested_aio(result: Translated) -> None:
    zero = result.tree.get("zero_optimization")
    if not isinstance(zero, dict) or "aio" not in zero:
        return
    nested = zero.pop("aio")
    if result.tree.get("aio"):
        rule = "aio belongs at the top level, where it is also given"
        result.problems.append(Problem("zero_optimization.aio", nested, rule, "keep only the top-level aio"))
        return
    result.tree["aio"] = nested
    result.renamed["aio"] = "zero_optimization.aio"
    text, edit = "read as the top-level section aio, where it belongs", Edit(("zero_optimization", "aio"), to=("aio",))
    result.remarks.append(Remark("zero_optimization.aio", text, edit=edit))


def _bfloat16(result: Translated) -> None:
    if "bfloat16" not in result.tree:
        return
    alias = result.tree.pop("bfloat16")
    chosen = result.tree.get("bf16")
    if chosen is None:
        result.tree["bf16"] = alias
        result.renamed["bf16"] = "bfloat16"
    elif alias not in (None, chosen):
        rule = "bfloat16 is another name of the section bf16, which is given too and differs"
        result.problems.append(Problem("bfloat16", alias, rule, "keep only bf16"))


def _tensor_parallel(result: Translated) -> None:
    """Translate the two names of the tensor-parallel size."""
    section = result.tree.get("tensor_parallel")
    if isinstance(section, dict) and "tensor_parallel" in section and "tp" not in section:
        section["tp"] = section.pop("tensor_parallel")
        result.renamed["tensor_parallel.tp"] = "tensor_parallel.tensor_parallel"


def _drop_unknown(result: Translated) -> None:
    """With hf_zero.ignore_unknown_keys, drop unknown top-level keys, as DeepSpeed does."""
    own = result.tree.get("hf_zero")
    if not isinstance(own, dict) or str(own.get("ignore_unknown_keys")).lower() != "true":
        return
    for key in [key for key in result.tree if key not in Root.model_fields and not is_section(key)]:
        del result.tree[key]
        text = "there is no such key; ignored (hf_zero.ignore_unknown_keys)"
        result.remarks.append(Remark(key_path("", key), text, edit=Edit((key,))))


# Sections in which programs store their own values, which DeepSpeed ignores. The keys of its other sections are known,
# so an unknown key there is a mistake.
_LOOSE = {"", "checkpoint"}
_ROUNDS = 20  # every round removes the invalid keys; at most the depth of the config plus one are needed


def validate(tree: dict[str, Any]) -> tuple[Root, list[Problem | Remark]]:
    """Return the typed config without invalid keys, and a finding for each of those."""
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


def validated(raw: Mapping[str, Any]) -> Root:
    """Translate and validate a config, which may lack values, or raise ConfigError with all problems."""
    translated = translate(raw)
    config, findings = validate(translated.tree)
    problems = translated.problems + [finding for finding in findings if isinstance(finding, Problem)]
    if problems:
        raise ConfigError(problems)
    return config


def drop_null_sections(tree: dict[str, Any]) -> None:
    """Remove null sections in place, because null means absent."""
    for path in [path for path, value in sections_in(tree) if value is None]:
        _remove(tree, path.split("."))
    _drop_null(tree, schema_for(tree)[0])


def _drop_null(tree: dict[str, Any], section: type[Section]) -> None:
    for name, entry in section.model_fields.items():
        below = subsection(entry)
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


def _worded(path: Sequence[str | int], value: object, entry: ErrorDetails) -> Problem | Remark:
    name = dotted(tuple(path))
    if entry["type"] == "extra_forbidden":
        return unknown_key([str(step) for step in path], value)
    if isinstance(value, str) and value.strip().lower() == "auto":
        edit = Edit(tuple(map(str, path)), value="auto")
        return Problem(name, value, '"auto" is written in lower case', 'write "auto"', edit=edit)
    return Problem(name, value, _rule(entry), _fix(path, value))


def unknown_key(path: Sequence[str], value: object) -> Problem | Remark:
    """Return the finding for an unknown key. In some places it is ignored with a remark, unless it resembles a known
    key."""
    *parents, key = path
    schema = whole_schema()
    section = section_of(schema, parents)
    siblings = [name for name in section.model_fields if parents or name != "hf_zero"] if section else []
    where = f"in {'.'.join(parents)}" if parents else "at the top level"
    # The names of our own settings are not suggested for DeepSpeed's.
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
    """Return an example of the section that the author of this value probably meant."""
    fields = section.model_fields if section is not None else {}
    kinds = {"enabled": bool, "stage": int, "device": str, "type": str}
    key = next((key for key, kind in kinds.items() if key in fields and type(value) is kind), None)
    return "{...}, for example {}" if key is None else json.dumps({key: value})


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
