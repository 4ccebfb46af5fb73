"""transformers.trainer_utils: the search for the newest checkpoint."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable

from hf_zero.integration.patches import Patches
from hf_zero.log import logger

PATCHES = Patches("transformers.trainer_utils")
_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@PATCHES.add(
    "get_last_checkpoint(folder)",
    without="a checkpoint that was being written when the job died may be taken for the newest",
    until="get_last_checkpoint passes over folders without trainer_state.json",
    importers=("transformers", "transformers.trainer"),
)
def around_get_last_checkpoint(original: Callable[[str], str | None], folder: str) -> str | None:
    """Passes over a checkpoint that was being written when the job died: Trainer writes trainer_state.json last, and
    cannot resume without it."""
    newest = original(folder)
    if newest is None or os.path.exists(os.path.join(newest, _STATE)):
        return newest
    names = {int(match[1]): match[0] for match in map(_NAME.fullmatch, os.listdir(folder)) if match}
    complete = [step for step, name in names.items() if os.path.exists(os.path.join(folder, name, _STATE))]
    if not complete:
        return newest  # perhaps not written by Trainer
    chosen = os.path.join(folder, names[max(complete)])
    _say_once(newest, chosen)
    return chosen


@functools.cache
def _say_once(newest: str, chosen: str) -> None:
    """Scripts ask for the newest checkpoint, and Trainer asks again."""
    logger.warning("%s is incomplete (no %s: the job ended while saving); resuming from %s", newest, _STATE, chosen)
