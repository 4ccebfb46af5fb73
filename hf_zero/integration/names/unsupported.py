"""Names of DeepSpeed that hf_zero does not have: importable, because others import them, and an error on use.

names.json lists DeepSpeed's modules with the classes, errors, functions and constants that each defines, and with what
each borrows from others: by name (`borrowed` where a rule cannot say from whom: `with_homes`) or (`stars`) all of it.
Modules that we have nothing for are made of it, and modules of ours take from it what they lack. No name does anything.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from hf_zero.instead import alternative

Homes = dict[str, str]
# Modules that are others of the package, or of ours, under a second name.
SAME_MODULE = {
    "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "dist": "deepspeed.comm",
    "utils.groups": "hf_zero.integration.compat.groups",
    "zero": "deepspeed.runtime.zero",
}
_BUILDERS = "ops.op_builder"  # every module below it has all builders


@functools.cache
def all_homes() -> Mapping[str, Homes]:
    """Where hf_zero keeps what DeepSpeed's modules offer: module without `deepspeed.` -> name -> dotted home.

    homes.json, and that of every extra that is there, have rows `"module": {"home below hf_zero": "name theirs=ours"}`.
    A name is listed once, at the module that defines it in DeepSpeed; names.json says which modules import it from
    there (but for utils.z3_leaf_module, which has a function of that very name).
    """
    here = Path(__file__)
    homes: dict[str, Homes] = {}
    for path in (here.with_name("homes.json"), *sorted(here.parents[2].glob("extras/*/homes.json"))):
        for module, row in json.loads(path.read_text(encoding="utf-8")).items():
            homes.setdefault(module, {}).update(_entries(row))
    return homes


def _entries(row: Mapping[str, str]) -> list[tuple[str, str]]:
    pairs = [(home, *name.partition("=")) for home, names in row.items() for name in names.split()]
    return [(theirs, f"hf_zero.{home}.{ours or theirs}") for home, theirs, _, ours in pairs]


def homes_of(module: str) -> Homes:
    """The names of ours in DeepSpeed's `module` (without `deepspeed.`)."""
    return all_homes().get(_BUILDERS if f"{module}.".startswith(f"{_BUILDERS}.") else module, {})


ROOT = "deepspeed"
# Gone from DeepSpeed 0.19.8, and still imported by programs.
REMOVED: dict[str, dict[str, Any]] = {
    "compression.compress": {"functions": "init_compression redundancy_clean student_initialization"},
    "compression.scheduler": {"classes": "compression_scheduler"},
    "elasticity": {"package": True, "classes": "DSElasticAgent"},
    "elasticity.config": {"errors": ""},
    "elasticity.elasticity": {"functions": ""},
    "ops.muon": {"package": True},
    "ops.sparse_attention": {"package": True},
    "ops.sparse_attention.sparsity_config": {"classes": ""},
}
# Imported by functions of these modules only; programs look for them there.
_INSIDE_FUNCTIONS = {
    "utils.z3_leaf_module": {
        "borrowed": dict.fromkeys(
            ("DEFAULT_LEAF_MODULE_CLASSES", "DEFAULT_LEAF_MODULE_NAMES", "DEFAULT_LEAF_MODULE_NAME_SUFFIXES"),
            "runtime.zero.leaf_module_config",
        )
    }
}
FEATURES = "docs/features.md in the hf_zero repository lists what exists"


@functools.cache
def known_modules() -> Mapping[str, Mapping[str, Any]]:
    """names.json: by module path without `deepspeed.`; read when a name is asked for that has no home of ours."""
    table = with_homes(json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8")))
    return {**table, **REMOVED, **{module: {**table[module], **more} for module, more in _INSIDE_FUNCTIONS.items()}}


def with_homes(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The table with the module that defines it for every borrowed name, instead of `uses`: names, separated by blanks,
    that one module alone defines."""
    homes = {name: modules[0] for name, modules in definers(table).items()}
    rows = {}
    for module, row in table.items():
        borrowed = {name: source for source, names in row.get("borrowed", {}).items() for name in names.split()}
        borrowed.update((name, homes[name]) for name in row.get("uses", "").split())
        rest = {kind: value for kind, value in row.items() if kind not in ("uses", "borrowed")}
        rows[module] = {**rest, "borrowed": dict(sorted(borrowed.items()))} if borrowed else rest
    return rows


def definers(table: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Name -> the modules that define it."""
    modules: dict[str, list[str]] = {}
    for module, row in table.items():
        for kind in ("classes", "errors", "functions"):
            for name in row.get(kind, "").split():
                modules.setdefault(name, []).append(module)
        for name in row.get("values", ()):
            modules.setdefault(name, []).append(module)
    return modules


def refusal(path: str) -> str:
    """The error message for a name (`path` without `deepspeed.`)."""
    instead = alternative(path)
    return f"{ROOT}.{path} is not supported by hf_zero{f': {instead}' if instead else ''}. {FEATURES}."


@functools.cache
def known_names(module: str) -> tuple[str, ...]:
    """Every name that DeepSpeed's module has, without submodules."""
    row = known_modules().get(module, {})
    own = [name for kind in ("classes", "errors", "functions") for name in row.get(kind, "").split()]
    starred = [name for star in row.get("stars", "").split() for name in known_names(star)]
    return (*own, *row.get("values", ()), *row.get("borrowed", ()), *starred)


def find(module: str, name: str) -> object:
    """The placeholder for `name` of DeepSpeed's `module`; LookupError if that has no such name."""
    row = known_modules().get(module, {})
    if name in row.get("values", ()):
        value = row["values"][name]
        return list(value) if isinstance(value, list) else value
    path = f"{module}.{name}" if module else name
    for kind, make in (("classes", _refused_class), ("errors", _refused_error), ("functions", _refused_function)):
        if name in row.get(kind, "").split():
            return make(path)
    if name in row.get("borrowed", ()):
        return getattr(import_module(f"{ROOT}.{row['borrowed'][name]}".rstrip(".")), name)
    for star in row.get("stars", "").split():
        if not name.startswith("_") and (name in homes_of(star) or name in known_names(star)):
            return getattr(import_module(f"{ROOT}.{star}"), name)
    raise LookupError(path)


def children(module: str) -> list[str]:
    """Names of the modules right below `module`."""
    return [path.rpartition(".")[2] for path in known_modules() if path and path.rpartition(".")[0] == module]


def is_package(module: str) -> bool:
    return "package" in known_modules().get(module, {})


def _refused_class(path: str) -> type:
    """A class to name, to subclass and to ask isinstance about; making one raises NotImplementedError."""

    def __new__(cls: type, *_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(refusal(path))

    return type(_last(path), (), {"__new__": __new__, **_signs(path)})


def _refused_error(path: str) -> type:
    """An exception class for `except` clauses; nothing of ours raises it."""
    return type(_last(path), (Exception,), _signs(path))


def _refused_function(path: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(refusal(path))

    signs = _signs(path)
    refuse.__name__ = refuse.__qualname__ = _last(path)
    refuse.__doc__, refuse.__module__ = signs["__doc__"], signs["__module__"]
    return refuse


def _signs(path: str) -> dict[str, str]:
    return {"__module__": f"{ROOT}.{path}".rpartition(".")[0], "__doc__": refusal(path)}


def _last(path: str) -> str:
    return path.rpartition(".")[2]
