"""Around transformers' search for the newest checkpoint: one that was being written when the job died is passed over.

Trainer writes trainer_state.json last, and cannot resume without it.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable

logger = logging.getLogger("hf_zero")
_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def around(original: Callable[[str], str | None]) -> Callable[[str], str | None]:
    def get_last_checkpoint(folder: str) -> str | None:
        newest = original(folder)
        if newest is None or os.path.exists(os.path.join(newest, _STATE)):
            return newest
        found = {int(match[1]): match[0] for match in map(_NAME.fullmatch, os.listdir(folder)) if match}
        complete = [step for step, name in found.items() if os.path.exists(os.path.join(folder, name, _STATE))]
        if not complete:
            return newest  # perhaps not written by Trainer at all
        chosen = os.path.join(folder, found[max(complete)])
        _say_once(newest, chosen)
        return chosen

    return get_last_checkpoint


@functools.cache
def _say_once(newest: str, chosen: str) -> None:
    """Scripts ask for the newest checkpoint, and Trainer asks again."""
    logger.warning("%s is incomplete (no %s: the job ended while saving); resuming from %s", newest, _STATE, chosen)
