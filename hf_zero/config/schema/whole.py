"""The schema of a config: the core's, with the sections of the extras that the config requests."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import create_model

from hf_zero.config.errors import Problem
from hf_zero.config.extras import (
    ASKED_BY,
    INSTALL,
    ExtraMissing,
    extra_asked_by,
    extra_named,
    installed,
    is_section,
    loaded,
)
from hf_zero.config.features import Extra
from hf_zero.config.schema.fields import detail
from hf_zero.config.schema.root import HfZero, Root


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
    schema.rules = (*Root.rules, *(rule for extra in extras for rule in extra.rules))
    return schema


def services_for(tree: Mapping[str, Any], name: str) -> Iterator[Any]:
    """Yield the services of this name from the extras that a config requests."""
    for extra in schema_for(tree)[0].features:
        if name in extra.services:
            yield loaded(extra.services[name])
