"""Every "auto" replaced where somebody knows a value, and every fixed value compared with what it must agree with."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_zero.config.choices.optimizer import optimizer_takes
from hf_zero.config.errors import Edit, Other, Problem
from hf_zero.config.left_out import left_out
from hf_zero.config.offers import Offer, offers
from hf_zero.config.sources import ConfigDict, Source, dotted, is_auto, is_open, leaves, source_in
from hf_zero.config.views import TrainingView, Views

# Arguments that TrainingArguments has for Adam, and not every optimizer takes.
_OF_ADAM = ("optimizer.params.betas", "optimizer.params.eps")


@dataclass(slots=True)
class Changes:
    """What filling a config comes down to; the config itself is left alone."""

    values: dict[tuple[str, ...], object] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def fill(config: Mapping[str, Any], views: Views) -> Changes:
    """The values for all autos that somebody knows and for keys left to the code; a problem per contradiction."""
    known, changes = offers(config, views), Changes()
    for path, value in leaves(config):
        name = dotted(path)
        offer = known.get(name)
        if offer is None or _is_foreign(config, name):
            continue
        if is_open(config, name, value, offer.source):
            changes.values[path] = offer.value
            changes.sources[name] = offer.source
        elif offer.must_match and value is not None and not (same(value, offer.value) or same(value, offer.also)):
            changes.problems.append(conflict(config, path, value, offer))
    for path, offer in left_out(config, views, known):
        changes.values[path] = offer.value
        if not is_auto(offer.value):
            changes.sources[dotted(path)] = offer.source
    if views.training is not None and views.training.save_on_each_node:
        _one_writer_per_node(config, changes, views.training)
    return changes


def _one_writer_per_node(config: Mapping[str, Any], changes: Changes, training: TrainingView) -> None:
    """The one key that Trainer sets whether or not the config has it."""
    if isinstance(config.get("checkpoint", {}), Mapping):
        path = ("checkpoint", "use_node_local_storage")
        changes.values[path] = True
        changes.sources[dotted(path)] = training.source("save_on_each_node")


def apply(config: dict[str, Any], changes: Changes) -> None:
    """Write the values into the config, in place, and remember who gave them."""
    for path, value in changes.values.items():
        _set(config, path, value, lambda section: section or {})  # null is as good as absent
    if isinstance(config, ConfigDict):
        config.filled.update(changes.sources)


def drop_unfilled(config: dict[str, Any], keep: str = "") -> None:
    """Take out, in place, every "auto" that nobody filled: absent means the default, everywhere.

    Args:
        keep: leave what stands below this path.
    """
    for path in unfilled_autos(config):
        if keep and dotted(path).startswith(f"{keep}."):
            continue
        holder = config
        for key in path[:-1]:
            holder = holder[key]
        del holder[path[-1]]


def filled(config: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """A copy of the config with the values written in; sections that no value touches are shared."""
    result: dict[str, Any] = dict(config)
    for path, value in changes.values.items():
        _set(result, path, value, lambda section: dict(section or {}))
    return result


def _set(holder: dict[str, Any], path: tuple[str, ...], value: object, opened: Callable[[Any], dict[str, Any]]) -> None:
    """Write a value below sections, each of which is replaced by what `opened` makes of it."""
    for key in path[:-1]:
        holder[key] = opened(holder.get(key))
        holder = holder[key]
    holder[path[-1]] = value


def unfilled_autos(config: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The paths that still say "auto"."""
    return [path for path, value in leaves(config) if is_auto(value)]


def same(left: object, right: object) -> bool:
    """Equal as settings: 8, 8.0 and "8" are; true and 1 are not."""
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    left, right = _plain(left), _plain(right)
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return left == right


def _plain(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return int(value) if value.strip().isdecimal() and len(value) < 300 else float(value)
    except ValueError:
        return value


def conflict(config: Mapping[str, Any], keys: tuple[str, ...], value: object, offer: Offer) -> Problem:
    """The problem of a fixed value that somebody else states differently.

    Only a flag says which of the two its author wants: a default of TrainingArguments must not replace what is written.
    """
    shown = offer.value if isinstance(offer.value, (numbers.Number, list)) else str(offer.value)
    path, rule = dotted(keys), "the config and TrainingArguments must say the same"
    fix = 'write "auto" in the config so that it follows, or make the two equal'
    origin, other = str(source_in(config, path)), Other(offer.name, shown, str(offer.source))
    edit = Edit(keys, value="auto") if offer.source.kind == "flag" else None
    return Problem(path, value, rule, fix, origin=origin, other=other, edit=edit)


def _is_foreign(config: Mapping[str, Any], path: str) -> bool:
    """Whether the optimizer or schedule in the config does not take the argument that somebody offers."""
    section = config.get("optimizer") if path in _OF_ADAM else None
    kind = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(kind, str) or not isinstance(section, Mapping):
        return False
    params = section.get("params")
    return not optimizer_takes(kind, params if isinstance(params, Mapping) else {}, path.rpartition(".")[2])
