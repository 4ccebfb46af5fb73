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
from contextlib import suppress
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hf_zero.config.features import Extra
from hf_zero.config.schema.optimizer_types import OptimizerType, known_type

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
    "service.restarts": "resilience",
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
    return next((kind for kind in types if kind.name.lower() == name.lower()), None)


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
