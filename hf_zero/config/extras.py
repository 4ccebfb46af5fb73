"""Extras: rarely used features, each with its own sections, rules, policy and code, imported on demand.

An extra is a package that has an `EXTRA`. `ASKED_BY` lists ours by the part of a config that requests them: the path
of a section, or an optimizer's type. Other packages register theirs in the same way with entry points of one group:

    [project.entry-points."hf_zero.extras"]
    my_section = "my_package.extra:EXTRA"
    "optimizer.MyOptimizer" = "my_package.extra:EXTRA"

Nothing else in hf_zero names an extra: code gets one here, or an error that names the missing package.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import create_model

from hf_zero.config.choices.optimizer_types import OptimizerType, known_type
from hf_zero.config.errors import Problem
from hf_zero.config.features import Extra
from hf_zero.config.schema.fields import detail
from hf_zero.config.schema.root import HfZero, Root

_PACKAGE = "hf_zero.extras"
_GROUP = "hf_zero.extras"
_OPTIMIZER = "optimizer."
INSTALL = "install it (hf_zero's own come with the whole package)"

# Section or optimizer type -> the extra, a package in hf_zero/extras. Features see a forward in this order. Keys that
# begin with "service." are requested by commands.
ASKED_BY: dict[str, str] = {
    "curriculum_learning": "data_efficiency",
    "data_efficiency": "data_efficiency",
    "progressive_layer_drop": "data_efficiency",
    "sparse_attention": "sparse_attention",
    "compression_training": "compression",
    "hf_zero.distillation": "compression",
    "elasticity": "elasticity",
    "expert_parallel": "experts",
    "hf_zero.resilience": "resilience",
    "hf_zero.streaming": "streaming",
    "autotuning": "autotuning",
    "optimizer.OneBitAdam": "one_bit",
    "optimizer.OneBitLamb": "one_bit",
    "optimizer.ZeroOneAdam": "one_bit",
    "service.tune": "autotuning",
    "service.measure": "autotuning",
    "service.expert_size": "experts",
    "service.spread_experts": "experts",
    "service.streamed_updates": "streaming",
    "service.peers": "resilience",
}


class ExtraMissing(ImportError):
    """A requested extra is not installed."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the extra {name!r} is not installed ({reason})")
        self.name = name


def loaded(target: str) -> Any:
    """Import and return the object "module:name"."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def extra_named(name: str) -> Extra:
    """Return one of our extras.

    Raises:
        ExtraMissing: its package is not installed.
    """
    try:
        extra: Extra = import_module(f"{_PACKAGE}.{name}").EXTRA
    except ModuleNotFoundError as error:
        if error.name is None or not f"{_PACKAGE}.{name}".startswith(error.name):
            raise  # something that it needs is missing, which is another matter
        raise ExtraMissing(name, f"there is no {_PACKAGE}.{name}") from None
    return extra


def extra_asked_by(key: str) -> Extra | None:
    """Return the extra with this section or `optimizer.TYPE`, or None.

    Raises:
        ExtraMissing: it is not installed.
    """
    known = next((asking for asking in ASKED_BY if asking.lower() == key.lower()), None)
    if known is not None:
        return extra_named(ASKED_BY[known])
    entry = _others().get(key.lower())
    if entry is None:
        return None
    try:
        extra: Extra = entry.load()
    except (ImportError, AttributeError) as error:
        raise ExtraMissing(entry.name, f"{entry.value}: {error}") from error
    return extra


@functools.cache
def _others() -> dict[str, EntryPoint]:
    """Return the extras of other packages. The look-up takes milliseconds, so it only happens for unknown keys."""
    return {entry.name.lower(): entry for entry in entry_points(group=_GROUP)}


def service(name: str) -> Any:
    """Return an extra's service for a command.

    Raises:
        ExtraMissing: it is not installed.
    """
    extra = extra_asked_by(f"service.{name}")
    assert extra is not None, "ASKED_BY lists every service"
    return loaded(extra.services[name])


def services_for(tree: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield the services of this name from the extras that a config requests."""
    for extra in schema_for(tree)[0].features:
        if name in extra.services:
            yield loaded(extra.services[name])


def is_section(key: str) -> bool:
    """Whether an extra, installed or not, has this top-level key."""
    return key in ASKED_BY or key.lower() in _others()  # names of services contain a dot, top-level keys do not


def section_names() -> tuple[str, ...]:
    """Return the top-level keys of our extras."""
    return tuple(key for key in ASKED_BY if "." not in key)


def optimizer_type(name: str) -> OptimizerType | None:
    """Return the optimizer type for a name in a config, including those of extras, or None.

    Raises:
        ExtraMissing: the extra is not installed.
    """
    kind = known_type(name)
    if kind is not None:
        return kind
    extra = extra_asked_by(_OPTIMIZER + name)
    types = () if extra is None else extra.optimizers
    return next((each for each in types if each.name.lower() == name.lower()), None)


def optimizer_names() -> tuple[str, ...]:
    """Return the optimizer types of our extras, installed or not."""
    return tuple(key.removeprefix(_OPTIMIZER) for key in ASKED_BY if key.startswith(_OPTIMIZER))


def installed() -> tuple[Extra, ...]:
    """Return our installed extras."""
    extras = []
    for name in dict.fromkeys(ASKED_BY.values()):
        with suppress(ExtraMissing):
            extras.append(extra_named(name))
    return tuple(extras)


def sections_in(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of every section in a config that belongs to an extra."""
    own = tree.get("hf_zero")
    for path, value in tree.items():
        if isinstance(path, str) and path not in Root.model_fields and is_section(path):
            yield path, value
    for key, value in own.items() if isinstance(own, Mapping) else ():
        if isinstance(key, str) and key not in HfZero.model_fields and is_section(f"hf_zero.{key}"):
            yield f"hf_zero.{key}", value


def schema_for(tree: Mapping[str, Any]) -> tuple[type[Root], list[Problem]]:
    """Return the schema with the extra sections in `tree`, and a problem for each whose extra is missing."""
    asked: set[Extra | None] = set()
    problems = []
    for path, value in sections_in(tree):
        if value is None:
            continue
        try:
            asked.add(extra_asked_by(path))
        except ExtraMissing as error:
            problems.append(Problem(path, value, str(error), f"{INSTALL}, or remove the section"))
    ours = [name for name in dict.fromkeys(ASKED_BY.values()) if name in {extra.name for extra in asked if extra}]
    extras = tuple(extra_named(name) for name in ours)
    others = sorted((extra for extra in asked if extra and extra not in extras), key=lambda extra: extra.name)
    return schema_with((*extras, *others)), problems


def whole_schema() -> type[Root]:
    """Return the schema with the sections of all installed extras, for the pages and for suggested keys."""
    return schema_with(installed())


@functools.cache
def schema_with(extras: tuple[Extra, ...]) -> type[Root]:
    """Return the schema with the sections and features of the core and of `extras`."""
    if not extras:
        return Root
    fields: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    for section in (section for extra in extras for section in extra.sections):
        parent, _, key = section.path.rpartition(".")
        (ours if parent == "hf_zero" else fields)[key] = (section.kind | None, detail(None, section.doc))
    if ours:
        own = create_model("HfZero", __base__=HfZero, __doc__=HfZero.__doc__, **ours)
        fields["hf_zero"] = (own | None, detail(None, Root.model_fields["hf_zero"].description or ""))
    schema = create_model("Root", __base__=Root, __doc__=Root.__doc__, **fields)
    schema.features = (*extras, *Root.features)
    return schema
