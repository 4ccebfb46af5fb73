"""The config that transformers and accelerate have read: brought into their form, and filled in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config.draft import Path, value_in
from hf_zero.config.errors import ABSENT
from hf_zero.config.extras import section_names
from hf_zero.config.pipeline import typed
from hf_zero.config.policies import Findings
from hf_zero.config.rename import ZERO, other_names
from hf_zero.config.schema.batch import MICRO, STEPS, TRAIN
from hf_zero.config.schema.fields import as_whole, subsection
from hf_zero.config.schema.root import Root
from hf_zero.config.sources import ConfigDict, Source, auto_is_a_value, dotted, is_auto, leaves
from hf_zero.config.validate import drop_null_sections

_NUMBERS = ((MICRO,), (STEPS,), (TRAIN,), (ZERO, "stage"))
_INNER = ((ZERO, "offload_optimizer"), (ZERO, "offload_param"), ("optimizer", "params"), ("scheduler", "params"))


def normalise(config: dict[str, Any]) -> None:
    """Convert the settings that other libraries read from the raw config to the form that they expect, in place.

    Raises:
        ConfigError: a section is not an object; lists all other problems, too.
    """
    zero = config.get(ZERO, ABSENT)
    if zero is None or isinstance(zero, bool):
        config[ZERO] = zero = {} if zero is None else {"stage": int(zero)}
    for section, old, new, _ in other_names(Root):
        # Names that are given twice stay, and are reported when the config is resolved.
        if section == (ZERO,) and isinstance(zero, dict) and old in zero and new not in zero:
            zero[new] = zero.pop(old)
            if isinstance(config, ConfigDict):
                config.rename(f"{ZERO}.{old}", f"{ZERO}.{new}")
    drop_null_sections(config)
    sections = [name for name, field in Root.model_fields.items() if subsection(field) is not None]
    for path in (*((name,) for name in (*sections, *section_names())), *_INNER):
        if not isinstance(value_in(config, path), (Mapping, type(ABSENT))):
            typed(config).without_problems()
    for path in _NUMBERS:
        holder, value = value_in(config, path[:-1]), value_in(config, path)
        if isinstance(value, (str, float)) and not is_auto(value):
            try:
                holder[path[-1]] = as_whole(value)
            except ValueError:
                pass  # reported with all other problems, when the config is resolved


def write_back(config: dict[str, Any], findings: Findings, *, drop: bool = False, except_below: str = "") -> None:
    """Write the values that have been filled in to the config that was examined, in the form for other libraries.

    Args:
        drop: remove every "auto" that is left; an absent key means the default.
        except_below: remove nothing below this path.
    """
    write(config, findings.filled)
    if drop:
        drop_unfilled(config, except_below)
    normalise(config)


def drop_unfilled(config: dict[str, Any], except_below: str = "") -> None:
    """Remove every "auto" that is left in place, except below a path; an absent key means the default."""
    for path in unfilled_autos(config):
        if not (except_below and dotted(path).startswith(f"{except_below}.")):
            del value_in(config, path[:-1])[path[-1]]


def write(config: dict[str, Any], values: Mapping[Path, tuple[object, Source | None]]) -> None:
    """Write values to a config in place, and record their sources."""
    for path, (value, source) in values.items():
        holder = config
        for key in path[:-1]:
            if holder.get(key) is None:  # a null section counts as absent
                holder[key] = {}
            holder = holder[key]
        holder[path[-1]] = value
        if isinstance(config, ConfigDict) and source is not None:
            config.filled[dotted(path)] = source


def unfilled_autos(config: Mapping[str, Any]) -> list[Path]:
    """Return the paths whose value is still "auto", and should be another."""
    return [path for path, value in leaves(config) if is_auto(value) and not auto_is_a_value(dotted(path))]
