"""Around accelerate's reading of ds.json: comments, trailing commas, duplicate keys, and the place of every key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.config import load_config
from hf_zero.config.batch import STEPS
from hf_zero.config.canonical import normalise

# Fields of DeepSpeedPlugin, flags of the launcher and arguments of Accelerator and Trainer state these; DeepSpeedPlugin
# takes a file without them for one that says 1 and 1.0.
_STATED_ELSEWHERE = (STEPS, "gradient_clipping")


def around(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, config_file_or_dict: Any) -> None:
        config = load_config(config_file_or_dict)
        normalise(config)
        for key in _STATED_ELSEWHERE:
            config.setdefault(key, "auto")
        original(self, config)

    return __init__
