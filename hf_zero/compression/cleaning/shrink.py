"""Cutting a model: rows, heads and channels leave the tensors of a layer and of those that are tied to them.

    rows       the layer's outputs            related: the inputs of what reads them (a gate's partner: its outputs)
    heads      the layer's inputs             related: the outputs of Q, K and V, also packed in one projection
    channels   the layer's filters            related: the inputs of the next convolution; a batch norm's channels

Only plain tensors are cut: the model has left its engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from hf_zero.compression.layers import Layer, layers_of
from hf_zero.compression.matching import Match
from hf_zero.errors import WrongArgument

_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "num_kv_heads")
_HEAD_WIDTHS = ("all_head_size", "split_size", "inner_dim")
_INTERLEAVED = ("query_key_value",)  # Q, K and V of one head lie together; elsewhere all of Q, then K, then V


def cut(tensor: nn.Parameter, dim: int, kept: Tensor) -> nn.Parameter:
    """A parameter with only these slices of `dim`."""
    values = tensor.detach().index_select(dim, kept.to(tensor.device)).clone()
    return nn.Parameter(values, requires_grad=tensor.requires_grad)


def cut_outputs(module: nn.Module, kept: Tensor) -> None:
    """Leave only these outputs of a linear layer, a convolution or a batch norm."""
    layer = _layer(module)
    if layer is None:
        _cut_norm(module, kept)
        return
    before = layer.num_out
    module.register_parameter("weight", cut(layer.parameter, layer.out_dim, kept))
    if layer.bias is not None:
        module.register_parameter("bias", cut(layer.bias, 0, kept))
    _rename(module, ("out_features", "out_channels", "nf"), before, len(kept))


def cut_inputs(module: nn.Module, kept: Tensor) -> None:
    """Leave only these inputs of a linear layer or a convolution."""
    layer = _layer(module)
    assert layer is not None
    if getattr(module, "groups", 1) != 1:
        raise WrongArgument(f"{type(module).__name__} with groups={module.groups}: its inputs cannot be cut one by one")
    before = layer.num_in
    module.register_parameter("weight", cut(layer.parameter, layer.in_dim, kept))
    _rename(module, ("in_features", "in_channels", "nx"), before, len(kept))


def _layer(module: nn.Module) -> Layer | None:
    found = [layer for layer in layers_of(module) if layer.module is module]
    return found[0] if found and found[0].kind in ("linear", "conv") else None


def _rename(module: nn.Module, names: Sequence[str], before: int, after: int) -> None:
    for name in names:
        if vars(module).get(name) == before:
            setattr(module, name, after)


def _cut_norm(module: nn.Module, kept: Tensor) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(name, cut(parameter, 0, kept))
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.dim() == 1:
            module.register_buffer(name, buffer.index_select(0, kept.to(buffer.device)).clone())
    if "num_features" in vars(module):
        vars(module)["num_features"] = len(kept)


def cut_rows(match: Match, mask: Tensor) -> None:
    """Take out the outputs that a mask drops, and what belongs to them."""
    kept, total = _kept(mask), mask.numel()
    for name, module in match.related:
        related = _layer(module)
        if related is None or (related.num_in != total and related.num_out == total):
            _check(name, total, related.num_out if related else len(next(module.parameters(recurse=False))))
            cut_outputs(module, kept)
        else:
            _check(name, total, related.num_in)
            cut_inputs(module, kept)
    cut_outputs(match.layer.module, kept)


def cut_heads(model: nn.Module, match: Match, mask: Tensor) -> None:
    """Take out the heads that a mask drops: the projection's inputs, and the outputs of Q, K and V."""
    num_heads, kept = mask.numel(), _kept(mask)
    inputs = match.layer.num_in
    cut_inputs(match.layer.module, _elements(kept, inputs // num_heads))
    for name, module in match.related:
        related = _layer(module)
        if related is None or related.num_out % num_heads:
            raise WrongArgument(
                f"compression_training.head_pruning: {name} does not have {num_heads} equal heads; where keys and "
                "values have fewer heads than queries, set num_heads to their number (num_key_value_heads)"
            )
        segments = 1
        if related.num_out % inputs == 0 and not name.endswith(_INTERLEAVED):
            segments = related.num_out // inputs
        cut_outputs(module, _packed(kept, num_heads, related.num_out, segments))
    for module in _attention_modules(model, match):
        _count_heads(module, num_heads, len(kept))


def _packed(kept: Tensor, num_heads: int, num_out: int, segments: int) -> Tensor:
    segment = num_out // segments
    own = _elements(kept, segment // num_heads)
    return torch.cat([own + number * segment for number in range(segments)])


def _attention_modules(model: nn.Module, match: Match) -> Iterator[nn.Module]:
    """The parents of the projections, each once: they count heads."""
    names = [match.layer.name, *(name for name, _ in match.related)]
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in names):
        yield model.get_submodule(parent)


def _count_heads(module: nn.Module, before: int, after: int) -> None:
    for name, value in list(vars(module).items()):
        is_count = name in (*_HEAD_COUNTS, *_HEAD_WIDTHS) and isinstance(value, int)
        if is_count and value % before == 0:
            setattr(module, name, value // before * after)


def _kept(mask: Tensor) -> Tensor:
    return mask.reshape(-1).nonzero().view(-1).cpu()


def _elements(kept: Tensor, size: int) -> Tensor:
    """Numbers of the elements of blocks of `size`."""
    return (kept.view(-1, 1) * size + torch.arange(size)).view(-1)


def _check(name: str, wanted: int, found: int) -> None:
    if wanted != found:
        raise WrongArgument(
            f"compression_training: related module {name} has {found} where the pruned layer has {wanted} outputs; "
            "name the modules that read the pruned layer's outputs in related_modules"
        )


