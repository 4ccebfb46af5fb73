"""transformers.masking_utils: packed documents are looked for in whole sequences, where ranks share them."""

from __future__ import annotations

from typing import Any

from hf_zero.integration.patches import Function, Patches
from hf_zero.sequence.forwards import asked_for_documents

PATCHES = Patches("transformers.masking_utils")


@PATCHES.add(
    "find_packed_sequence_indices(position_ids)",
    without="packed documents attend to one another where ranks share sequences",
    until="transformers hands the position ids on to the mask function of an attention implementation",
)
def around_find_packed(original: Function, position_ids: Any) -> Any:
    """A rank's part of a row may not show where documents begin; the mask is made of the whole row (`masks.py`)."""
    return None if asked_for_documents() else original(position_ids)
