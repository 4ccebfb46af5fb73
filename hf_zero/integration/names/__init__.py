"""The alias package: modules whose names load on first use, and placeholders for names that hf_zero does not have.

Placeholders can be imported, because other libraries import them, and raise an error on use. names.json lists
DeepSpeed's modules with the classes, errors, functions and constants that each defines, and with the names that each
imports from others: by name (`borrowed` if a rule cannot infer the source: `with_homes`) or all of them (`stars`).
Modules without an implementation are built from it, and other modules take missing names from it.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from hf_zero.integration.names.instead import alternative

Homes = dict[str, str]
# Modules that are second names of others, in the package or in hf_zero.
SAME_MODULE = {
    "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "dist": "deepspeed.comm",
    "utils.groups": "hf_zero.integration.compat.groups",
    "zero": "deepspeed.runtime.zero",
}
_BUILDERS = "ops.op_builder"  # every module below it has all builders


@functools.cache
def all_homes() -> Mapping[str, Homes]:
    """Locations of DeepSpeed's names in hf_zero: module without `deepspeed.` -> name -> dotted home.

    homes.json, and that of every present extra, have rows `"module": {"home below hf_zero": "name theirs=ours"}`.
    A name is listed once, at the module that defines it in DeepSpeed; names.json says which modules import it from
    there (except for utils.z3_leaf_module, which has a function of that name).
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
    """hf_zero's names in DeepSpeed's `module` (without `deepspeed.`)."""
    return all_homes().get(_BUILDERS if f"{module}.".startswith(f"{_BUILDERS}.") else module, {})


ROOT = "deepspeed"
# Removed from DeepSpeed 0.19.8, but still imported by programs.
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
# Only imported inside functions of these modules, where programs look for them.
_INSIDE_FUNCTIONS = {
    "utils.z3_leaf_module": {
        "borrowed": dict.fromkeys(
            ("DEFAULT_LEAF_MODULE_CLASSES", "DEFAULT_LEAF_MODULE_NAMES", "DEFAULT_LEAF_MODULE_NAME_SUFFIXES"),
            "runtime.zero.leaf_module_config",
        )
    }
}
FEATURES = "docs/features.md lists what exists (hf-zero docs features shows it)"


@functools.cache
def known_modules() -> Mapping[str, Mapping[str, Any]]:
    """names.json, by module path without `deepspeed.`; read on the first access to a name without a home."""
    table = with_homes(json.loads(Path(__file__).with_name("names.json").read_text(encoding="utf-8")))
    return {**table, **REMOVED, **{module: {**table[module], **more} for module, more in _INSIDE_FUNCTIONS.items()}}


def with_homes(table: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The table with the defining module of every borrowed name, instead of `uses`: space-separated names that only one
    module defines."""
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
    for kind in ("classes", "errors", "functions"):
        if name in row.get(kind, "").split():
            return _refused(kind, path)
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


def _refused(kind: str, path: str) -> object:
    """A function that raises NotImplementedError; a class for annotations, subclassing and isinstance checks, whose
    instantiation does; or an exception class for `except` clauses, which hf_zero never raises."""

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(refusal(path))

    module, _, name = f"{ROOT}.{path}".rpartition(".")
    signs = {"__module__": module, "__doc__": refusal(path)}
    if kind == "errors":
        return type(name, (Exception,), signs)
    if kind == "classes":
        return type(name, (), {"__new__": refuse, **signs})
    refuse.__name__ = refuse.__qualname__ = name
    refuse.__module__, refuse.__doc__ = module, signs["__doc__"]
    return refuse


PACKAGE = Path(__file__).resolve().parents[2]
COPIED = {"utils.zero_to_fp32": "zero_to_fp32.py"}  # scripts that programs copy next to their checkpoints


def lazy_names(module: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of an alias module.

    Names with a home are hf_zero's. Other names of DeepSpeed's module can also be imported, but raise on use.
    """
    path = module.partition(".")[2]

    def __getattr__(name: str) -> object:
        homes = homes_of(path)
        if name in homes:
            home, _, attribute = homes[name].rpartition(".")
            # Stored in the module, so that the next access is a plain lookup and user code may replace it.
            return vars(sys.modules[module]).setdefault(name, getattr(import_module(home), attribute))
        inner = f"{path}.{name}" if path else name
        if inner in SAME_MODULE or inner in known_modules():
            return import_module(f"{ROOT}.{inner}")
        try:
            return vars(sys.modules[module]).setdefault(name, find(path, name))
        except LookupError:
            error = AttributeError(_missing(f"{module}.{name}"), name=name, obj=sys.modules.get(module))
            raise error from None

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module]), *homes_of(path), *known_names(path), *children(path)})

    return __getattr__, __dir__


def missing_module(name: str) -> ModuleNotFoundError:
    # `name` is the missing home. With the requested name, `from deepspeed import x` would replace this text by "cannot
    # import name".
    return ModuleNotFoundError(_missing(name), name=f"hf_zero.integration.{name}")


def _missing(name: str) -> str:
    return (
        f"hf_zero answers as deepspeed here and has no {name!r}: {FEATURES}. "
        "To use a real DeepSpeed instead, install it and leave HF_ZERO unset."
    )


class GeneratedLoader:
    """Creates a module of the alias package, whose names are looked up in the tables on demand."""

    def create_module(self, spec: ModuleSpec) -> None:
        """None: an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        path = module.__name__.partition(".")[2]
        if path in SAME_MODULE:
            sys.modules[module.__name__] = import_module(SAME_MODULE[path])
            return
        if path in COPIED:
            # Not by __getattr__: inspect queries every module's file, even during an import.
            module.__file__ = str(PACKAGE / COPIED[path])
        built = f"Names of DeepSpeed, from where hf_zero keeps them (homes.json): deepspeed.{path}."
        module.__doc__ = built if _has_names_of_ours(path) else refusal(path)
        vars(module)["__getattr__"], vars(module)["__dir__"] = lazy_names(module.__name__)

    def get_code(self, name: str) -> object:
        """The code that `python -m` runs: the module's main()."""
        return compile(f"import sys\nfrom {name} import main\nsys.exit(main())", name, "exec")


def _has_names_of_ours(path: str) -> bool:
    borrowed = known_modules().get(path, {}).get("borrowed", {}) if is_package(path) else {}
    return bool(homes_of(path)) or any(name in homes_of(module) for name, module in borrowed.items())


def generated_spec(name: str) -> ModuleSpec | None:
    """The spec of a module `deepspeed....`; None if neither DeepSpeed nor hf_zero has it."""
    path = name.partition(".")[2]
    if path not in known_modules() and path not in all_homes() and path not in SAME_MODULE:
        return None
    return ModuleSpec(name, GeneratedLoader(), origin=__file__, is_package=is_package(path))  # type: ignore[arg-type]
