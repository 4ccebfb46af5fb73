"""Around accelerate's check that a config file stands alone: say which settings were given beside it, and where."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from hf_zero.config import ConfigError, Other, Problem
from hf_zero.config.errors import ABSENT
from hf_zero.config.sources import source_in
from hf_zero.integration.views import LAUNCHED, PRECISION_VARIABLE


def around(original: Callable[..., None]) -> Callable[..., None]:
    def _deepspeed_config_checks(self: Any) -> None:
        try:
            original(self)
        except ValueError as error:
            problems = list(_doubles(self.hf_ds_config))
            if not problems:
                raise
            raise ConfigError(problems, headline=str(error)) from None

    return _deepspeed_config_checks


def _doubles(hf_config: Any) -> Iterator[Problem]:
    fields = os.environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    for path, (field, variable) in {
        **LAUNCHED,
        "bf16.enabled, fp16.enabled": ("mixed_precision", PRECISION_VARIABLE),
    }.items():
        if field not in fields:
            continue
        value = ", ".join(str(part) for part in map(hf_config.get_value, path.split(", ")) if part is not None)
        yield Problem(
            path,
            value or ABSENT,
            "with deepspeed_config_file, the settings stand in that file alone",
            f"remove {field} from the accelerate config file; the value belongs into {path} of the DeepSpeed config",
            origin=str(source_in(hf_config.config, path)) if value else "",
            other=Other(field, os.environ.get(variable, "(not exported)"), "accelerate config file"),
        )
