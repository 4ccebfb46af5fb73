"""Stage 1: loads a config from any supported form into a plain dict that other libraries can read, too."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping

from hf_zero.config.errors import ConfigError, Problem
from hf_zero.config.sources import ConfigDict


def load_config(source: object) -> ConfigDict:
    """Return the config as a new dict, or raise ConfigError with the fix.

    The result remembers the file and line of each key.
    """
    if isinstance(source, Mapping):
        return _copied(source)
    from hf_zero.config.text import FORMS, WORDS, from_text_or_path  # not needed for a dict

    if isinstance(source, (str, os.PathLike)):
        return from_text_or_path(source)
    raise ConfigError(Problem("config", source, f"a {type(source).__name__} is not a config", FORMS, words=WORDS))


def _copied(source: Mapping[object, object]) -> ConfigDict:
    try:
        if isinstance(source, ConfigDict):
            return copy.deepcopy(source)
        return ConfigDict(copy.deepcopy(dict(source)))  # keys are checked when the config is resolved
    except Exception as error:
        rule = f"the dict cannot be copied: {error}"
        raise ConfigError(Problem("config", source, rule, "use plain values")) from error
