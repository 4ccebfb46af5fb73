"""Around accelerate's reading of ds.json: comments, trailing commas, duplicate keys, and the place of every key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.config import load_config
from hf_zero.config.canonical import normalise


def around(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, config_file_or_dict: Any) -> None:
        config = load_config(config_file_or_dict)
        normalise(config)
        original(self, config)

    return __init__
