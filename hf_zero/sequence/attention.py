"""Ulysses attention for transformers models: ranks exchange heads, so that each attends over whole sequences.

    q, k, v [b, H, l, d]    --exchange-->    [b, H / n, n * l, d]    --attention-->    --exchange-->    [b, l, H, d]

This module wraps transformers' attention functions; models that are not attached are not affected.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from hf_zero.comm import Collectives
from hf_zero.features import text_config, unwrapped
from hf_zero.sequence.forwards import MARK, after_forward, before_forward, install_masks
from hf_zero.sequence.layer import HEADS, POSITIONS, exchange, gather
from hf_zero.sequence.mixers import attach_mixers, check_kinds, find_mixers
from hf_zero.sequence.scans import functions_of
from hf_zero.sequence.shared import (
    MODULES,
    RUNNING,
    Shared,
    check_heads,
    copies_of_key_heads,
    with_groups_of_heads,
)

_HANDLES = "_hf_zero_sequence_hooks"
_EAGER = "eager_attention_forward"


def attach(model: nn.Module, group: Collectives, *, skips_evaluation: bool) -> None:
    """Enable sequence parallelism in `model`, whose inputs are then parts of sequences.

    Args:
        group: the ranks that share sequences.
        skips_evaluation: whether inputs in eval mode are whole sequences.

    Raises:
        ValueError: if its attention cannot be wrapped, or its heads cannot be divided among the ranks.
    """
    base = unwrapped(model)
    check_model(base, group.size)
    detach(model)
    config = text_config(getattr(base, "config", None))
    mixers = find_mixers(base, config)
    shared = Shared(group, config, skips_evaluation, attends=not has_scans_alone(base), has_mixers=bool(mixers))
    for module in _of_text(base, config):
        MODULES[module] = shared
    MODULES[model] = shared
    hooks = (
        *attach_mixers(mixers, shared),
        model.register_forward_pre_hook(before_forward, with_kwargs=True),
        model.register_forward_hook(after_forward, always_call=True),
    )
    vars(model)[_HANDLES] = hooks
    install(shared.config._attn_implementation or "eager", base.modules())


def detach(model: nn.Module) -> None:
    """Disable sequence parallelism in `model`."""
    for handle in vars(model).pop(_HANDLES, ()):
        handle.remove()
    for module in model.modules():
        MODULES.pop(module, None)


def is_attached(model: nn.Module) -> bool:
    return model in MODULES and _HANDLES in vars(model)


def check_model(model: Any, size: int) -> None:
    """Raises ValueError if the model does not support sequence parallelism with `size` ranks."""
    if not is_supported(model):
        raise ValueError(
            f"{type(model).__name__} does not use transformers' attention interface, so that heads cannot be exchanged "
            "around attention: use a model that does, or deepspeed.sequence.layer.DistributedAttention"
        )
    config = text_config(getattr(model, "config", None))
    check_config(config, size)
    find_mixers(model, config)


def is_supported(model: Any) -> bool:
    """Whether ranks know where to exchange heads: in transformers' attention interface, or in scans alone."""
    takes = getattr(model, "_can_set_attn_implementation", None)
    return (takes is not None and bool(takes())) or has_scans_alone(model)


def has_scans_alone(model: Any) -> bool:
    """Whether a model has no attention (Mamba)."""
    config = text_config(getattr(model, "config", None))
    if config is None or getattr(config, "num_attention_heads", None) is not None:
        return False
    mixers = find_mixers(model, config)
    return bool(mixers) and all(functions_of(mixer, 1) for mixer in mixers)


def check_config(config: Any, size: int) -> None:
    """Like `check_model`, for a model config."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError("encoder-decoder models cannot share sequences: their two sequences have different lengths")
    check_kinds(config)
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int):
        check_heads(heads, size)


def _of_text(model: nn.Module, config: Any) -> Iterable[nn.Module]:
    """The modules of a model, except for submodels with another config (for images or audio)."""
    modules, waiting = [], [model]
    while waiting:
        module = waiting.pop()
        own: Any = getattr(module, "config", None)
        inner = text_config(own)
        if own is not None and type(inner) is not type(config):
            continue
        modules.append(module)
        waiting.extend(module.children())
    return modules


def install(name: str, modules: Iterable[nn.Module]) -> None:
    """Wrap the attention function `name`, for the rest of this process, to check whether a module shares sequences."""
    from transformers import AttentionInterface

    install_masks(name)
    if name == "eager":  # every modeling file defines its own function
        for file in {sys.modules[type(module).__module__] for module in modules}:
            original = getattr(file, _EAGER, None)
            if original is not None and not hasattr(original, MARK):
                setattr(file, _EAGER, _around(original))
        return
    registered: Any = AttentionInterface._global_mapping[name]
    if not hasattr(registered, MARK):
        AttentionInterface.register(name, _around(registered))


def _around(core: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(core)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **more: Any
    ) -> Any:
        shared = MODULES.get(module)
        if shared is None or RUNNING.mixers or not (shared.is_on(module) or RUNNING.sight is not None):
            return core(module, query, key, value, attention_mask, *args, **more)
        group, heads = shared.group, query.shape[HEADS]
        check_heads(heads, group.size)
        copies = copies_of_key_heads(key.shape[HEADS], group.size)
        if copies > 1:
            key, value = key.repeat_interleave(copies, dim=HEADS), value.repeat_interleave(copies, dim=HEADS)
        query, key, value = exchange(group, [query, key, value], split=HEADS, join=POSITIONS)
        if RUNNING.sight is not None:
            RUNNING.sight.num_exchanges += 1
        _check_mask(attention_mask, key)
        more = _for_whole(group, more, heads)
        with with_groups_of_heads(module, query.shape[HEADS] // key.shape[HEADS]):
            output, weights = core(module, query, key, value, attention_mask, *args, **more)
        # The output of attention is [b, positions, heads, d].
        (output,) = exchange(group, [output], split=1, join=2)
        return output, weights

    setattr(attention, MARK, core)
    return attention


def _check_mask(mask: Any, key: Tensor) -> None:
    if isinstance(mask, Tensor) and mask.shape[-1] != key.shape[POSITIONS]:
        raise NotImplementedError(
            f"the model created an attention mask {tuple(mask.shape)} for this rank's positions, but whole sequences "
            f"have {key.shape[POSITIONS]}: it cannot share sequences"
        )


def _for_whole(group: Collectives, more: dict[str, Any], heads: int) -> dict[str, Any]:
    """Convert arguments of an attention function that depend on positions or heads."""
    if more.get("position_bias") is not None:
        raise NotImplementedError("attention with position_bias cannot share sequences")
    arguments, positions, sinks = dict(more), more.get("position_ids"), more.get("s_aux")
    if isinstance(positions, Tensor) and positions.dim() == 2:  # flash attention derives documents from them
        arguments["position_ids"] = gather(group, positions.contiguous(), dim=1)
    if isinstance(sinks, Tensor) and sinks.numel() == heads:
        per_rank = heads // group.size
        arguments["s_aux"] = sinks.narrow(0, group.rank * per_rank, per_rank)
    return arguments
