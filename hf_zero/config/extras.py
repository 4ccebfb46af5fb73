"""Extras: rarely used features, each with its own sections, rules, policy and code, imported on demand.

An extra is a package that has an `EXTRA`. `ASKED_BY` names ours by what in a config asks for them: the path of a
section, or an optimizer's type. Those of other packages are named the same way, by entry points of one group:

    [project.entry-points."hf_zero.extras"]
    my_section = "my_package.extra:EXTRA"
    "optimizer.MyOptimizer" = "my_package.extra:EXTRA"

Nothing else in hf_zero names an extra: code that needs one asks here, and gets it or an error naming what is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
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

# What asks for it -> the extra, a package in hf_zero/extras. Features see a forward in this order. What begins with
# "service." is asked for by a command.
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
    """An extra that is asked for is not there."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the extra {name!r} is not installed ({reason})")
        self.name = name


def loaded(target: str) -> Any:
    """The object at "module:name"."""
    module, _, name = target.partition(":")
    return getattr(import_module(module), name)


def extra_named(name: str) -> Extra:
    """One of ours.

    Raises:
        ExtraMissing: its package is not there.
    """
    try:
        extra: Extra = import_module(f"{_PACKAGE}.{name}").EXTRA
    except ModuleNotFoundError as error:
        if error.name is None or not f"{_PACKAGE}.{name}".startswith(error.name):
            raise  # something that it needs is missing, which is another matter
        raise ExtraMissing(name, f"there is no {_PACKAGE}.{name}") from None
    return extra


def extra_asked_by(key: str) -> Extra | None:
    """The extra that has this section or `optimizer.TYPE`; None: none has.

    Raises:
        ExtraMissing: it is not there.
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
    """Extras of other packages; the look-up takes milliseconds, and is done for unknown keys only."""
    return {entry.name.lower(): entry for entry in entry_points(group=_GROUP)}


def service(name: str) -> Any:
    """An extra's service for a command.

    Raises:
        ExtraMissing: it is not there.
    """
    extra = extra_asked_by(f"service.{name}")
    assert extra is not None, "the table says whose it is"
    return loaded(extra.services[name])


def services_for(tree: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Services of this name of the extras that a config asks for."""
    for extra in schema_for(tree)[0].features:
        if name in extra.services:
            yield loaded(extra.services[name])


def is_section(key: str) -> bool:
    """Whether an extra, there or not, has this key of the top level."""
    return key in ASKED_BY or key.lower() in _others()  # no service: those have a dot, keys of the top level none


def section_names() -> tuple[str, ...]:
    """Keys of the top level that our extras have."""
    return tuple(key for key in ASKED_BY if "." not in key)


def optimizer_type(name: str) -> OptimizerType | None:
    """The type that the config means by this name, an extra's included; None: there is none.

    Raises:
        ExtraMissing: the extra is not there.
    """
    kind = known_type(name)
    if kind is not None:
        return kind
    extra = extra_asked_by(_OPTIMIZER + name)
    types = () if extra is None else extra.optimizers
    return next((each for each in types if each.name.lower() == name.lower()), None)


def optimizer_names() -> tuple[str, ...]:
    """Types that our extras add, installed or not."""
    return tuple(key.removeprefix(_OPTIMIZER) for key in ASKED_BY if key.startswith(_OPTIMIZER))


def installed() -> tuple[Extra, ...]:
    """Those of ours that are there."""
    return tuple(_installed(dict.fromkeys(ASKED_BY.values())))


def _installed(names: Iterable[str]) -> Iterator[Extra]:
    for name in names:
        try:
            yield extra_named(name)
        except ExtraMissing:
            continue


def sections_in(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(path, value) of every section in a config that only an extra can know."""
    own = tree.get("hf_zero")
    for path, value in tree.items():
        if isinstance(path, str) and path not in Root.model_fields and is_section(path):
            yield path, value
    for key, value in own.items() if isinstance(own, Mapping) else ():
        if isinstance(key, str) and key not in HfZero.model_fields and is_section(f"hf_zero.{key}"):
            yield f"hf_zero.{key}", value


def schema_for(tree: Mapping[str, Any]) -> tuple[type[Root], list[Problem]]:
    """The schema with the sections that `tree` asks for, and a problem for each whose extra is missing."""
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
    """With the sections of all our extras that are there: for pages, and for what a wrong key may have meant."""
    return schema_with(installed())


@functools.cache
def schema_with(extras: tuple[Extra, ...]) -> type[Root]:
    """The core's sections and those of `extras`, whose `features` are these and the core's."""
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
