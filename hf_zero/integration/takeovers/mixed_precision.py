"""Around DeepSpeedPlugin.set_mixed_precision: a flag and a file that disagree are named with their places."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hf_zero.config import Other, Problem
from hf_zero.config.schema.fields import as_flag
from hf_zero.config.sources import ConfigDict, source_in
from hf_zero.integration.host_words import raise_both
from hf_zero.integration.views import mixed_precision_source
from hf_zero.log import logger

_SECTION = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}


def around(original: Callable[..., None]) -> Callable[..., None]:
    def set_mixed_precision(self: Any, mixed_precision: str) -> None:
        wanted = _SECTION.get(str(mixed_precision))
        if wanted is not None:
            problems = list(_the_other(self.deepspeed_config, wanted, mixed_precision))
            if problems:
                twin = copy.copy(self)
                twin.deepspeed_config = copy.deepcopy(dict(self.deepspeed_config))
                raise_both(problems, lambda: original(twin, mixed_precision))
            _warn_if_off(self.deepspeed_config, wanted, mixed_precision)
        original(self, mixed_precision)

    return set_mixed_precision


def _the_other(config: Mapping[str, Any], wanted: str, flag: str) -> Iterator[Problem]:
    other = "bf16" if wanted == "fp16" else "fp16"
    if _is(config, other, True):
        path = f"{other}.enabled"
        yield Problem(
            path,
            True,
            f"`--mixed_precision` cannot be {flag} when {other} is switched on in the config",
            f'remove one of the two, or write {path}: "auto" and {wanted}.enabled: "auto" so that the flag decides',
            origin=str(source_in(config, path)),
            other=Other("mixed_precision", flag, str(mixed_precision_source(os.environ))),
        )


def _warn_if_off(config: Mapping[str, Any], wanted: str, flag: str) -> None:
    path = f"{wanted}.enabled"
    if _is(config, wanted, False) and not _filled(config, path):
        logger.warning(
            "mixed_precision is %s (%s), but %s is false (%s): the config decides, and training is not in %s",
            flag,
            mixed_precision_source(os.environ),
            path,
            source_in(config, path),
            flag,
        )


def _is(config: Mapping[str, Any], section: str, expected: bool) -> bool:
    inside = config.get(section)
    if not isinstance(inside, Mapping) or "enabled" not in inside:
        return False
    try:
        return as_flag(inside["enabled"]) is expected
    except ValueError:
        return False  # "auto", or nonsense that the resolver names


def _filled(config: Mapping[str, Any], path: str) -> bool:
    return isinstance(config, ConfigDict) and path in config.filled
