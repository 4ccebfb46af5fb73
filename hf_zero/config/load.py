"""Loads a config from any supported form into a plain dict that other libraries can read, too."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from hf_zero.config.batch import MICRO, STEPS, TRAIN
from hf_zero.config.errors import ConfigError, Problem
from hf_zero.config.extras import section_names
from hf_zero.config.schema import Root
from hf_zero.config.schema.fields import as_whole, subsection
from hf_zero.config.sources import ConfigDict
from hf_zero.config.validate import ZERO_SPELLINGS, drop_null_sections, validated


def load_config(source: object) -> ConfigDict:
    """Return the config as a new dict, or raise ConfigError with the fix.

    The result remembers the file and line of each key.
    """
    if isinstance(source, Mapping):
        return _copied(source)
    from hf_zero.config.text import FORMS, from_text_or_path  # not needed for a dict

    if isinstance(source, (str, os.PathLike)):
        return from_text_or_path(source)
    raise ConfigError(Problem("config", source, f"a {type(source).__name__} is not a config", FORMS))


def _copied(source: Mapping[object, object]) -> ConfigDict:
    try:
        if isinstance(source, ConfigDict):
            return copy.deepcopy(source)
        return ConfigDict(copy.deepcopy(dict(source)))  # keys are checked when the config is resolved
    except Exception as error:
        rule = f"the dict cannot be copied: {error}"
        raise ConfigError(Problem("config", source, rule, "use plain values")) from error


_NUMBERS = ((MICRO,), (STEPS,), (TRAIN,), ("zero_optimization", "stage"))


def normalise(config: dict[str, Any]) -> None:
    """Convert the settings that other libraries read from the raw config to the form that they expect, in place.

    Raises:
        ConfigError: a section is not an object; lists all other problems, too.
    """
    if "zero_optimization" in config and config["zero_optimization"] is None:
        config["zero_optimization"] = {}
    if isinstance(config.get("zero_optimization"), bool):
        config["zero_optimization"] = {"stage": int(config["zero_optimization"])}
    _rename(config, config.get("zero_optimization"))
    drop_null_sections(config)
    _require_sections(config)
    for path in _NUMBERS:
        _make_whole(config, path)


def _rename(config: dict[str, Any], zero: object) -> None:
    """Rename keys to the names that accelerate reads. Duplicates are reported when the config is resolved."""
    if not isinstance(zero, dict):
        return
    for written, name in ZERO_SPELLINGS.items():
        if written not in zero or name in zero:
            continue
        zero[name] = zero.pop(written)
        if isinstance(config, ConfigDict):
            config.rename(f"zero_optimization.{written}", f"zero_optimization.{name}")


def _require_sections(config: dict[str, Any]) -> None:
    sections = [name for name, field in Root.model_fields.items() if subsection(field) is not None]
    sections += section_names()
    inner = [config.get("zero_optimization"), config.get("optimizer"), config.get("scheduler")]
    broken = [name for name in sections if name in config and not isinstance(config[name], Mapping)]
    broken += [
        name
        for section in inner
        if isinstance(section, Mapping)
        for name in ("offload_optimizer", "offload_param", "params")
        if name in section and not isinstance(section[name], Mapping)
    ]
    if broken:
        validated(config)


def _make_whole(config: dict[str, Any], path: tuple[str, ...]) -> None:
    holder: Any = config
    for key in path[:-1]:
        holder = holder.get(key)
        if not isinstance(holder, dict):
            return
    value = holder.get(path[-1])
    if isinstance(value, (str, float)) and value != "auto":
        try:
            holder[path[-1]] = as_whole(value)
        except ValueError:
            return  # reported with all other problems, when the config is resolved
