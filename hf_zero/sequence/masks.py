"""Attention masks of whole sequences, where transformers makes those of the parts that a rank has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.sequence.shared import RUNNING, Sight

MARK = "_hf_zero_shared_sequences"


def install_masks(name: str) -> None:
    """The mask function of an implementation answers for whole sequences from now on; other models see no change."""
    from transformers.masking_utils import AttentionMaskInterface

    original: Any = AttentionMaskInterface._global_mapping.get(name)
    if original is not None and not hasattr(original, MARK):
        AttentionMaskInterface.register(name, _whole(original))


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **keywords: Any) -> Any:
        """As the original; called with the extents of a part, it answers for the whole sequences."""
        sight = RUNNING.sight
        if sight is None or args or not _is_of(sight, keywords):
            return original(*args, **keywords)
        return original(**_of_all(sight, keywords))

    setattr(mask, MARK, original)
    return mask


def _is_of(sight: Sight, keywords: dict[str, Any]) -> bool:
    """Not of another part of the model, such as one for images."""
    config = keywords.get("config")
    return keywords.get("q_length") == sight.length and (config is None or type(config) is type(sight.config))


def _of_all(sight: Sight, keywords: dict[str, Any]) -> dict[str, Any]:
    if keywords.get("use_vmap") or keywords["kv_length"] != sight.length:
        raise NotImplementedError(
            "the model makes an attention mask of its own (a mask function with tensors in it, or a cache of another "
            "length), which is known for this rank's positions only: it cannot share sequences"
        )
    told = {**keywords, "q_length": sight.whole_length, "kv_length": sight.whole_length}
    if keywords.get("attention_mask") is not None:
        told["attention_mask"] = sight.padding
    documents = _documents(sight, keywords["batch_size"])
    if documents is not None:
        from transformers.masking_utils import packed_sequence_mask_function

        inner, within = told["mask_function"], packed_sequence_mask_function(documents)
        told["mask_function"] = lambda *indices: inner(*indices) & within(*indices)
        told["allow_is_causal_skip"] = False
    return told


def _documents(sight: Sight, batch_size: int) -> Any:
    """The number of every token's document, [batch, whole_length], where a row has several and transformers asks."""
    from transformers import masking_utils

    asked, sight.asks_for_documents = sight.asks_for_documents, False
    if not asked or sight.positions is None:
        return None
    RUNNING.sights.append(None)  # the look below is our own
    try:
        return masking_utils.find_packed_sequence_indices(sight.positions.expand(batch_size, -1))
    finally:
        RUNNING.sights.pop()


def asked_for_documents() -> bool:
    """Whether transformers asks for packed documents in a part of a sequence; they will be found in the whole."""
    if RUNNING.sight is None:
        return False
    RUNNING.sight.asks_for_documents = True
    return True
