"""Hooks around the forward of a model that shares sequences, for inputs that depend on other ranks' parts.

every rank has      input_ids [b, l], optionally position_ids, attention_mask, labels     of its own positions
forward gets        position_ids that continue those of the previous rank, if there were none
                    shift_labels with the first label of the next rank, if labels were not shifted yet
masks use           the position ids and attention masks of all ranks (`RUNNING.sight`), for whole sequences instead of
                    the parts that transformers knows
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.features import unwrapped
from hf_zero.sequence.batches import is_part
from hf_zero.sequence.layer import gather, told_by_all
from hf_zero.sequence.shared import CACHES, MODULES, RUNNING, Shared, Sight

IGNORED = -100
MARK = "_hf_zero_shared_sequences"


def before_forward(model: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
    """Forward pre-hook, with keywords. Collective."""
    candidates = [keywords.get("input_ids"), keywords.get("inputs_embeds"), *args[:1]]
    seen = next((tensor for tensor in candidates if isinstance(tensor, Tensor) and tensor.dim() >= 2), None)
    shared = MODULES.get(model)
    RUNNING.sights.append(None)
    RUNNING.mixers.clear()  # of a forward that was interrupted
    if shared is None or seen is None:
        return None
    # from_pretrained returns models in eval mode, and scripts may train them so; gradients distinguish these cases.
    if not shared.is_on(model) and not (is_part(seen) and torch.is_grad_enabled()):
        _check_whole(shared, seen)
        return None
    # The class's signature, because programs replace forward in instances by functions with arbitrary arguments.
    _, *parameters = inspect.signature(type(unwrapped(model)).forward).parameters
    keywords = {**dict(zip(parameters, args, strict=False)), **keywords}
    _check_parts(shared, seen)
    _check_cache(shared, model, keywords)
    length = seen.shape[1]
    if keywords.get("position_ids") is None and "position_ids" in parameters:
        first = shared.group.rank * length
        keywords["position_ids"] = torch.arange(first, first + length, device=seen.device).unsqueeze(0)
    _shift_labels(shared, model, keywords, seen)
    RUNNING.sights[-1] = _sight(shared, keywords, length)
    return (), keywords


def after_forward(model: nn.Module, args: Any, output: Any) -> None:
    """Forward hook, which must always be called; `output` is None after an error.

    Raises:
        NotImplementedError: if no attention ran through transformers' interface: parts have not seen each other.
    """
    sight = RUNNING.sights.pop() if RUNNING.sights else None
    if sight is not None and output is not None and not sight.num_exchanges and MODULES[model].attends:
        raise NotImplementedError(
            f"{type(unwrapped(model)).__name__} has called no attention of transformers' attention interface, around "
            "which ranks exchange heads: each rank has computed its part of the sequences alone. It cannot share "
            "sequences"
        )


def _check_whole(shared: Shared, seen: Tensor) -> None:
    """Raises RuntimeError on all ranks that share sequences if they evaluate parts of sequences."""
    if is_part(seen):
        raise RuntimeError(
            "the model is in eval mode, in which each rank processes whole sequences (disable_in_eval), but this batch "
            f"has parts of sequences that ranks {', '.join(map(str, shared.group.ranks))} share, which would be taken "
            "for whole ones. Prepare the loader for evaluation in a separate call, without the model "
            "(accelerator.prepare(loader)); each rank then gets its own whole batches"
        )


def _check_cache(shared: Shared, model: nn.Module, keywords: dict[str, Any]) -> None:
    handed = [name for name in CACHES if keywords.get(name) is not None]
    if shared.has_mixers and handed:
        raise NotImplementedError(
            f"{type(unwrapped(model)).__name__} got {handed[0]}=, but its recurrent states cannot continue where ranks "
            "share sequences: call it with use_cache=False, or generate with whole sequences (disable_in_eval, eval "
            "mode)"
        )


def _check_parts(shared: Shared, seen: Tensor) -> None:
    """Raises ValueError on all ranks if their parts have different shapes."""
    all_shapes = told_by_all(shared.group, seen.shape[:2], seen.device)
    if any(shape != all_shapes[0] for shape in all_shapes):
        shown = ", ".join(f"{batch} x {length}" for batch, length in all_shapes)
        raise ValueError(
            f"ranks {', '.join(map(str, shared.group.ranks))} share sequences, but their parts have different shapes "
            f"(samples x positions): {shown}. All parts of a sequence must have the same length: sequence length = "
            f"{shared.group.size} x n. Pad sequences to a multiple of {shared.group.size}, as "
            "UlyssesSPDataLoaderAdapter does"
        )


def _shift_labels(shared: Shared, model: nn.Module, keywords: dict[str, Any], seen: Tensor) -> None:
    """Shift labels for a causal loss, which needs the label of the next position, possibly from the next rank. Shifted
    labels are passed as both arguments, because models of transformers 5 compute no loss without `labels`."""
    if getattr(getattr(unwrapped(model), "loss_function", None), "__name__", "") != "ForCausalLMLoss":
        return
    labels, shifted = keywords.get("labels"), keywords.get("shift_labels")
    if labels is None and isinstance(shifted, Tensor):
        keywords["labels"] = shifted
    if not isinstance(labels, Tensor) or shifted is not None or labels.shape != seen.shape[:2]:
        return
    firsts = gather(shared.group, labels[:, :1].contiguous(), dim=1)
    ending = torch.full_like(labels[:, :1], IGNORED)
    following = torch.cat([firsts, ending], dim=1)[:, shared.group.rank + 1 :][:, :1]
    keywords["shift_labels"] = torch.cat([labels[:, 1:], following], dim=1)


def _sight(shared: Shared, keywords: dict[str, Any], length: int) -> Sight:
    positions, mask = keywords.get("position_ids"), keywords.get("attention_mask")
    whole_positions = padding = None
    if isinstance(positions, Tensor) and positions.dim() == 2:
        whole_positions = gather(shared.group, positions.contiguous(), dim=1)
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == length:
        padding = gather(shared.group, mask.to(torch.uint8), dim=1).bool()
        if getattr(shared.config, "is_causal", True) and bool((padding[:, 1:] <= padding[:, :-1]).all()):
            padding = None
        elif getattr(shared.config, "attention_chunk_size", None) and not bool(padding[:, 0].all()):
            raise NotImplementedError("chunked attention with padding on the left: pad on the right")
    return Sight(shared.config, length, shared.group.size * length, padding, whole_positions)


def install_masks(name: str) -> None:
    """Wrap an implementation's mask function to return masks of whole sequences; other models are not affected."""
    from transformers.masking_utils import AttentionMaskInterface

    original: Any = AttentionMaskInterface._global_mapping.get(name)
    if original is not None and not hasattr(original, MARK):
        AttentionMaskInterface.register(name, _whole(original))


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **keywords: Any) -> Any:
        """The original function; for the lengths of a part it returns the mask of whole sequences."""
        sight = RUNNING.sight
        if sight is None or args or not _is_of(sight, keywords):
            return original(*args, **keywords)
        return original(**_of_all(sight, keywords))

    setattr(mask, MARK, original)
    return mask


def _is_of(sight: Sight, keywords: dict[str, Any]) -> bool:
    """Whether the call is for the text model, not for another submodel such as one for images."""
    config = keywords.get("config")
    return keywords.get("q_length") == sight.length and (config is None or type(config) is type(sight.config))


def _of_all(sight: Sight, keywords: dict[str, Any]) -> dict[str, Any]:
    if keywords.get("use_vmap") or keywords["kv_length"] != sight.length:
        raise NotImplementedError(
            "the model creates its own attention mask (a mask function with tensors, or a cache of another length), "
            "which only covers this rank's positions: it cannot share sequences"
        )
    arguments = {**keywords, "q_length": sight.whole_length, "kv_length": sight.whole_length}
    if keywords.get("attention_mask") is not None:
        arguments["attention_mask"] = sight.padding
    documents = _documents(sight, keywords["batch_size"])
    if documents is not None:
        from transformers.masking_utils import packed_sequence_mask_function

        inner, within = arguments["mask_function"], packed_sequence_mask_function(documents)
        arguments["mask_function"] = lambda *indices: inner(*indices) & within(*indices)
        arguments["allow_is_causal_skip"] = False
    return arguments


def _documents(sight: Sight, batch_size: int) -> Any:
    """The document index of every token, [batch, whole_length]; None if not requested, or rows have one document."""
    from transformers import masking_utils

    asked, sight.asks_for_documents = sight.asks_for_documents, False
    if not asked or sight.positions is None:
        return None
    RUNNING.sights.append(None)  # do not intercept the following call
    try:
        return masking_utils.find_packed_sequence_indices(sight.positions.expand(batch_size, -1))
    finally:
        RUNNING.sights.pop()


def asked_for_documents() -> bool:
    """Whether transformers looks for packed documents in a part of a sequence; whole sequences are used instead."""
    if RUNNING.sight is None:
        return False
    RUNNING.sight.asks_for_documents = True
    return True
