"""Around DeepSpeedPlugin's filling of single autos: remember which flag, variable or field gave the value."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hf_zero.config import ConfigDict
from hf_zero.config.sources import is_auto
from hf_zero.integration.views import launch_source


def around(original: Callable[..., None]) -> Callable[..., None]:
    def fill_match(self: Any, ds_key_long: str, mismatches: Any = None, must_match: bool = True, **kwargs: Any) -> None:
        config = self.hf_ds_config.config
        before = self.hf_ds_config.get_value(ds_key_long)
        original(self, ds_key_long, mismatches, must_match=must_match, **kwargs)
        after = self.hf_ds_config.get_value(ds_key_long)
        if isinstance(config, ConfigDict) and is_auto(before) and not is_auto(after):
            config.filled[ds_key_long] = launch_source(ds_key_long, os.environ)

    return fill_match
