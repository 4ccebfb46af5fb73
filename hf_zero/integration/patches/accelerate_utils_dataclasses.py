"""accelerate.utils.dataclasses: DeepSpeedPlugin, which fills and checks ds.json from flags and variables."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hf_zero.config import ConfigDict, ConfigError, Other, Problem
from hf_zero.config.batch import MICRO, STEPS, TRAIN
from hf_zero.config.errors import ABSENT
from hf_zero.config.schema.fields import as_flag
from hf_zero.config.sources import is_auto, source_in
from hf_zero.integration.huggingface.engine_choice import raise_both
from hf_zero.integration.huggingface.views import LAUNCHED, PRECISION_VARIABLE, launch_source, mixed_precision_source
from hf_zero.integration.patches import Patches
from hf_zero.log import logger

PATCHES = Patches("accelerate.utils.dataclasses")
_SECTION = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16"}


@PATCHES.add(
    "DeepSpeedPlugin.fill_match(self, ds_key_long, mismatches, must_match, kwargs)",
    without='messages do not say who filled an "auto"',
    until="accelerate records the flag, variable or field that a value came from",
)
def around_fill_match(
    original: Callable[..., None],
    self: Any,
    ds_key_long: str,
    mismatches: Any = None,
    must_match: bool = True,
    **kwargs: Any,
) -> None:
    """Remembers which flag, variable or field gave the value of a single "auto", or of a number that was assumed."""
    config = self.hf_ds_config.config
    before = self.hf_ds_config.get_value(ds_key_long)
    if isinstance(config, ConfigDict) and config.assumes(ds_key_long):
        value = kwargs.get(ds_key_long, "auto")
        if not is_auto(value):
            config[ds_key_long] = value
            config.filled[ds_key_long] = launch_source(ds_key_long, os.environ)
        return
    original(self, ds_key_long, mismatches, must_match=must_match, **kwargs)
    after = self.hf_ds_config.get_value(ds_key_long)
    if isinstance(config, ConfigDict) and is_auto(before) and not is_auto(after):
        config.filled[ds_key_long] = launch_source(ds_key_long, os.environ)


@PATCHES.add(
    "DeepSpeedPlugin.set_mixed_precision(self, mixed_precision)",
    without="a precision that contradicts ds.json is reported in accelerate's words",
    until="accelerate's check names both places, and says when fp16 or bf16 is switched off in the file",
)
def around_set_mixed_precision(original: Callable[..., None], self: Any, mixed_precision: str) -> None:
    """A flag and a file that disagree are named with their places."""
    section = _SECTION.get(str(mixed_precision))
    if section is not None:
        problems = list(_the_other(self.deepspeed_config, section, mixed_precision))
        if problems:
            twin = copy.copy(self)
            twin.deepspeed_config = copy.deepcopy(dict(self.deepspeed_config))
            raise_both(problems, lambda: original(twin, mixed_precision))
        _warn_if_off(self.deepspeed_config, section, mixed_precision)
    original(self, mixed_precision)


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


@PATCHES.add(
    "DeepSpeedPlugin.set_deepspeed_weakref(self)",
    without="an unfinished batch equation in ds.json may stop the loading of a model",
    until="accelerate leaves the batch sizes out of the copy of ds.json that model loading reads",
)
def around_set_deepspeed_weakref(original: Callable[..., None], self: Any) -> None:
    """Model loading reads a copy of ds.json: a batch equation that cannot be checked yet must not stop it."""
    original(self)
    # The original writes 1 for what is still open, which contradicts a fixed train_batch_size.
    parts = (self.deepspeed_config.get(key) for key in (MICRO, STEPS))
    if any(part is None or is_auto(part) for part in parts):
        self.dschf.config.pop(TRAIN, None)


@PATCHES.add(
    "DeepSpeedPlugin._deepspeed_config_checks(self)",
    without="settings given beside a config file are reported in accelerate's words",
    until="accelerate's check names the settings that are given beside the file",
)
def around_config_checks(original: Callable[..., None], self: Any) -> None:
    """accelerate refuses settings beside a config file: says which were given, and where."""
    try:
        original(self)
    except ValueError as error:
        problems = list(_doubles(self.hf_ds_config))
        if not problems:
            raise
        raise ConfigError(problems, headline=str(error)) from None


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
            "with deepspeed_config_file, all settings belong in that file",
            f"remove {field} from the accelerate config file; the value belongs into {path} of the DeepSpeed config",
            origin=str(source_in(hf_config.config, path)) if value else "",
            other=Other(field, os.environ.get(variable, "(not exported)"), "accelerate config file"),
        )
