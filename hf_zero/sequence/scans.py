"""Scans and causal convolutions: ranks exchange heads for positions around a scan, as around attention.

    scan           [b, l, H, d]    --exchange-->    [b, n * l, H / n, d]    --scan-->    --exchange-->    [b, l, H, d]
    convolution    [b, c, l] behind the last k - 1 positions of the ranks before    -->    [b, c, l]

In transformers both are functions of modeling files, which this module wraps. All else that the mixers named here
compute is for single positions, so each rank does it for its own ones. Other mixers run on whole sequences.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from hf_zero.comm import Collectives
from hf_zero.sequence.layer import exchange, gather
from hf_zero.sequence.shared import RUNNING, check_heads, copies_of_key_heads


@dataclass(frozen=True, slots=True)
class _Scan:
    """The arguments of a scan, by name.

    Attributes:
        parts: tensors with heads and positions; some may have fewer heads.
        weights: tensors with heads in their first dimension.
        common: tensors with positions in their last dimension, which all heads have in common.
        heads, positions: dimensions of parts and output.
    """

    parts: tuple[str, ...]
    weights: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
    heads: int = 2
    positions: int = 1


_DELTA_RULE = _Scan(("query", "key", "value", "g", "beta"))
_SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": _Scan(("hidden_states", "dt", "B", "C"), ("A", "D", "dt_bias")),
    # Every channel is a head.
    "mamba_selective_scan": _Scan(
        ("hidden_states", "dt", "z"), ("A", "D", "delta_bias"), ("B", "C"), heads=1, positions=2
    ),
}
_CONVOLUTION = "causal_conv1d_fn"
_FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")  # if they return None, a mixer calls its parts
# The scan of every mixer that calls it and the convolution; None: it only calls the convolution.
_MIXERS: dict[str, str | None] = {
    name: scan
    for scan, names in (
        (
            "torch_chunk_gated_delta_rule",
            "LaraMiniGatedDeltaNet OlmoHybridGatedDeltaNet Qwen3NextGatedDeltaNet Qwen3_5GatedDeltaNet "
            "Qwen3_5MoeGatedDeltaNet",
        ),
        ("chunk_kimi_delta_attention", "BailingHybridDeltaAttention KimiLinearDeltaAttention"),
        (
            "mamba2_chunk_scan",
            "BambaMixer FalconH1Mixer GraniteMoeHybridMambaLayer Mamba2Mixer NemotronHMamba2Mixer Zamba2MambaMixer",
        ),
        ("mamba_selective_scan", "FalconMambaMixer JambaMambaMixer MambaMixer"),
        (None, "Lfm2MoeShortConv Lfm2ShortConv Lfm3ShortConv"),
    )
    for name in names.split()
}
_NUMBERS_OF_HEADS = ("num_v_heads", "num_heads", "intermediate_size")
_MARK = "_hf_zero_original"


def functions_of(mixer: nn.Module, size: int) -> tuple[str, ...]:
    """The functions with which a mixer combines positions, if `size` ranks can exchange its heads; else none."""
    kind, heads = type(mixer), next((getattr(mixer, name) for name in _NUMBERS_OF_HEADS if hasattr(mixer, name)), 0)
    if kind.__name__ not in _MIXERS or not kind.__module__.startswith("transformers.") or heads % size:
        return ()
    names = tuple(filter(None, (_CONVOLUTION, _MIXERS[kind.__name__])))
    return names if all(hasattr(sys.modules[kind.__module__], name) for name in names) else ()


def install_scans(mixer: nn.Module) -> None:
    """Wrap the functions of the mixer's file, for the rest of this process, to check whether ranks share sequences."""
    file = sys.modules[type(mixer).__module__]
    wrappers: dict[str, Callable[..., Any]] = {_CONVOLUTION: _around_convolution, **dict.fromkeys(_SCANS, _around_scan)}
    for name, wrapper in (wrappers | dict.fromkeys(_FUSED, _around_fused)).items():
        original = getattr(file, name, None)
        if original is not None and not hasattr(original, _MARK):
            wrapped = functools.wraps(original)(wrapper(name, original))
            setattr(wrapped, _MARK, original)
            setattr(file, name, wrapped)


def all_positions(group: Collectives, part: Tensor) -> Tensor:
    """All ranks' parts, [b, l, ...] each, as [b, n * l, ...]. Differentiable: backward adds up all ranks' gradients."""
    if not part.requires_grad:
        return gather(group, part.contiguous(), dim=1)
    (whole,) = exchange(group, [part.expand(group.size, *part.shape)], split=0, join=2)
    return whole.squeeze(0)


def _around_scan(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    parameters, kind = list(inspect.signature(original).parameters), _SCANS[name]

    def scan(*args: Any, **keywords: Any) -> Any:
        mixing = RUNNING.scanning
        if mixing is None:
            return original(*args, **keywords)
        mixing.calls.add(name)
        group = mixing.group
        given = dict(zip(parameters, args, strict=False)) | keywords
        parts = [each for each in kind.parts if given.get(each) is not None]
        heads = max(given[each].shape[kind.heads] for each in parts)
        check_heads(heads, group.size)
        for dtype in dict.fromkeys(given[each].dtype for each in parts):  # one message each
            names = [each for each in parts if given[each].dtype == dtype]
            enough = [_enough_heads(given[each], kind.heads, group.size) for each in names]
            given |= zip(names, exchange(group, enough, split=kind.heads, join=kind.positions), strict=True)
        for each in kind.common:
            given[each] = all_positions(group, given[each].transpose(1, -1)).transpose(1, -1)
        own = heads // group.size
        for each in kind.weights:
            if given.get(each) is not None:
                given[each] = given[each].narrow(0, group.rank * own, own)
        # By position where the model does so: kernels may have other names for these arguments.
        by_position = [given[each] for each in parameters[: len(args)]]
        result = original(*by_position, **{each: given[each] for each in keywords})
        output, *more = result if isinstance(result, tuple) else (result,)
        (output,) = exchange(group, [output], split=kind.positions, join=kind.heads)
        return (output, *more) if isinstance(result, tuple) else output

    return scan


def _enough_heads(tensor: Tensor, dim: int, size: int) -> Tensor:
    copies = copies_of_key_heads(tensor.shape[dim], size)
    return tensor.repeat_interleave(copies, dim=dim) if copies > 1 else tensor


def _around_convolution(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def convolution(hidden_states: Tensor, weight: Tensor, *args: Any, **keywords: Any) -> Any:
        mixing = RUNNING.scanning
        if mixing is None:
            return original(hidden_states, weight, *args, **keywords)
        mixing.calls.add(name)
        group, before = mixing.group, weight.shape[-1] - 1
        rows = hidden_states.transpose(1, 2)  # [b, l, c]
        length = rows.shape[1]
        kept = min(before, length)
        ends = all_positions(group, rows[:, length - kept :])[:, : group.rank * kept][:, -before:]
        rows = torch.cat([pad(ends, (0, 0, before - ends.shape[1], 0)), rows], dim=1)
        documents = keywords.get("seq_idx")  # of all positions
        if documents is not None:
            start = group.rank * length - before
            first = documents[:, :1].expand(-1, max(0, -start))
            own = documents[:, max(0, start) : start + before + length]
            keywords["seq_idx"] = torch.cat([first, own], dim=1)
        return original(rows.transpose(1, 2), weight, *args, **keywords)[..., before:]

    return convolution


def _around_fused(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **keywords: original(*args, **keywords) if RUNNING.scanning is None else None
