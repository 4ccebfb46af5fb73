"""Configs from single values, and what is wrong with a config."""

from __future__ import annotations

from typing import Any

import pytest

from hf_zero.config import ConfigError, Problem, resolve

BASE: dict[str, Any] = {"train_batch_size": 8}


def put(config: dict[Any, Any], path: str, value: Any) -> dict[Any, Any]:
    """Writes a value at a path, in sections that are made or copied on the way; returns the config."""
    *parents, name = path.split(".")
    holder = config
    for parent in parents:
        inner = holder.get(parent)
        holder[parent] = inner = dict(inner) if isinstance(inner, dict) else {}
        holder = inner
    holder[name] = value
    return config


def with_value(path: str, value: Any) -> dict[str, Any]:
    """A config with a batch size and this value."""
    return put(dict(BASE), path, value)


def error_of(config: Any, *views: Any, world_size: int = 1, **hosts: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(config, *views, world_size=world_size, **hosts)
    return caught.value


def paths_of(error: ConfigError) -> list[str]:
    return [problem.path for problem in error.problems]


def problem_of(config: Any, *views: Any, world_size: int = 1, **hosts: Any) -> Problem:
    """The only problem of a config."""
    error = error_of(config, *views, world_size=world_size, **hosts)
    assert len(error.problems) == 1, str(error)
    return error.problems[0]
