"""Around the check of what was loaded: keys noted by `unexpected_keys` enter the report that every load gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.integration.takeovers.unexpected_keys import NOTED


def around(original: Callable[..., None]) -> Callable[..., None]:
    def _adjust_missing_and_unexpected_keys(self: Any, loading_info: Any) -> None:
        loading_info.unexpected_keys |= vars(self).pop(NOTED, set())
        original(self, loading_info)

    return _adjust_missing_and_unexpected_keys
