"""A Llama in plain torch, for plans that are given only a number of parameters.

Names, shapes and activations are those of transformers' class (a test compares the traces), but importing that takes
longer than the rest of a plan. So does importing torch's compiler, which torch does to exclude functions from it:
`_checkpointed` and `SHAPES` avoid that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional


@dataclass
class LlamaShape:
    """The fields of transformers' `LlamaConfig` that determine shapes."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    use_cache: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of transformers' config of the same model."""
        return asdict(self) | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


class LlamaRMSNorm(nn.Module):
    """RMSNorm computed in fp32, as in transformers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + 1e-6)
        return self.weight * wide.to(hidden.dtype)


class _Attention(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.num_attention_heads * self.head_dim, shape.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = (*hidden.shape[:-1], -1, self.head_dim)
        query = self.q_proj(hidden).view(heads).transpose(1, 2)
        key = self.k_proj(hidden).view(heads).transpose(1, 2)
        value = self.v_proj(hidden).view(heads).transpose(1, 2)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        query, key = (query * cos) + (_half_turn(query) * sin), (key * cos) + (_half_turn(key) * sin)
        # Looked up in torch's module, where a trace replaces it.
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        seen = seen.transpose(1, 2).contiguous()
        return self.o_proj(seen.reshape(*hidden.shape[:-1], -1))  # type: ignore[no-any-return]


def _half_turn(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class _MLP(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))  # type: ignore[no-any-return]


class _LayerPlace:
    value: Tensor | None = None


class _Enough(Exception):  # noqa: N818  # not an error
    """All values that are needed have been recomputed."""


def _checkpointed(run: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """Like non-reentrant torch.utils.checkpoint: when backward needs the first saved value, all are recomputed, up to
    the last one that is needed."""
    saved: list[weakref.ref[_LayerPlace]] = []

    def keep(_: Tensor) -> _LayerPlace:
        place = _LayerPlace()
        saved.append(weakref.ref(place))
        return place

    def find(place: _LayerPlace) -> Tensor:
        if place.value is None:
            left = saved[::-1]

            def fill(value: Tensor) -> Tensor:
                value = value.detach()
                wanting = left.pop()()
                if wanting is not None:
                    wanting.value = value
                if not left:
                    raise _Enough
                return value

            with suppress(_Enough), torch.enable_grad(), saved_tensors_hooks(fill, lambda value: value):
                run(*given)
        value, place.value = place.value, None
        assert value is not None
        return value

    with saved_tensors_hooks(keep, find):
        return run(*given)


class _Layer(nn.Module):
    checkpoints = False

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _MLP(shape)
        self.input_layernorm = LlamaRMSNorm(shape.hidden_size)
        self.post_attention_layernorm = LlamaRMSNorm(shape.hidden_size)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.checkpoints:
            return _checkpointed(self._forward, hidden, cos, sin)
        return self._forward(hidden, cos, sin)

    def _forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        residual = hidden
        hidden = self.input_layernorm(hidden)
        hidden = self.self_attn(hidden, cos, sin)
        hidden = residual + hidden
        residual = hidden
        hidden = self.post_attention_layernorm(hidden)
        hidden = self.mlp(hidden)
        return residual + hidden


class _Model(nn.Module):
    frequencies: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        # Not `nn.Embedding(...)`: it draws random values, for which torch imports its compiler on the meta device.
        values = torch.empty(shape.vocab_size, shape.hidden_size)
        self.embed_tokens: nn.Embedding = nn.Embedding.from_pretrained(values, freeze=False)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = LlamaRMSNorm(shape.hidden_size)
        self.register_buffer("frequencies", torch.ones(shape.head_dim // 2), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        angles = positions[..., None].float() * self.frequencies.float()
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = both.cos().to(hidden.dtype), both.sin().to(hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.norm(hidden)  # type: ignore[no-any-return]


def ForCausalLMLoss(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:  # noqa: N802  # tiled_loss checks it
    wide = logits.float()
    following = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return functional.cross_entropy(wide.view(-1, vocab_size), following.view(-1))


class LayerOutput(NamedTuple):
    loss: Tensor
    logits: Tensor


class LlamaForCausalLM(nn.Module):
    """The part of transformers' class that `planning.model` uses. Values of weights are meaningless."""

    main_input_name = "input_ids"

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.config = shape
        self.model = _Model(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.loss_function = ForCausalLMLoss

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def gradient_checkpointing_enable(self, **_: object) -> None:
        """Enable non-reentrant checkpointing, whatever the arguments are."""
        for layer in self.model.layers:
            layer.checkpoints = True  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool = False) -> LayerOutput:
        logits = self.lm_head(self.model(input_ids))
        return LayerOutput(self.loss_function(logits, labels, self.config.vocab_size), logits)


# Outputs of operators: shape, strides and dtype. For meta tensors, torch computes them in Python, which takes as long
# as the rest of a trace, and imports its compiler and sympy for it, which takes longer than a plan. These are the
# operators of a Llama, for the usual case only (None: use torch); tests compare them with torch's.

_aten = torch.ops.aten


def _floats(*tensors: Tensor) -> bool:
    return all(each.is_meta and each.is_floating_point() for each in tensors)


def _new(like: Tensor, *shape: int) -> Tensor | None:
    return torch.empty(shape, dtype=like.dtype, device=like.device) if like.is_meta else None


def _elementwise(*operands: Any, **_: object) -> Tensor | None:
    """Use silu_backward, whose shape function is in C++."""
    tensors = [each for each in operands if isinstance(each, Tensor)]
    numbers = sum(type(each) in (int, float) for each in operands)
    if len(tensors) > 2 or len(tensors) + numbers < len(operands) or not _floats(*tensors):
        return None
    result: Tensor = _aten.silu_backward.default(tensors[0], tensors[-1])
    return result


def _in_place(values: Tensor, other: Any, **_: object) -> Tensor | None:
    return values if values.is_meta and getattr(other, "shape", None) == values.shape else None


def _like(values: Tensor, *, memory_format: torch.memory_format | None = None, **more: Any) -> Tensor | None:
    is_usual = memory_format in (None, torch.preserve_format) and not any(more.values())
    return _elementwise(values) if is_usual else None


def _arange(end: object, *, device: torch.device | None = None, **more: Any) -> Tensor | None:
    is_usual = device is not None and device.type == "meta" and not any(more.values())
    return torch.empty(end, dtype=torch.long, device=device) if is_usual and type(end) is int else None


def _reduced(values: Tensor, dims: Sequence[int] | None, keepdim: bool = False, **more: Any) -> Tensor | None:  # noqa: FBT001, FBT002
    if more or not _floats(values):
        return None
    gone = {dim % max(1, values.dim()) for dim in dims or range(values.dim())}
    return _new(values, *(1 if dim in gone else n for dim, n in enumerate(values.shape) if keepdim or dim not in gone))


def _concatenated(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    if not all(each.is_meta and each.dtype == first.dtype and each.dim() == first.dim() > 0 for each in tensors):
        return None
    if first.dim() > 3 and any(each.stride(-1) >= each.stride(1) for each in tensors):
        return None  # it may be in channels_last format
    extents = [list(each.shape) for each in tensors]
    along = [each.pop(dim) for each in extents]
    if any(each != extents[0] for each in extents):
        return None
    extents[0].insert(dim % first.dim(), sum(along))
    return _new(first, *extents[0])


def _product(first: Tensor, second: Tensor) -> Tensor | None:
    is_usual = first.dtype == second.dtype and first.shape[1] == second.shape[0]
    return _new(first, first.shape[0], second.shape[1]) if is_usual else None


def _log_softmax(values: Tensor, dim: int, half_to_float: bool) -> Tensor | None:  # noqa: FBT001
    return _elementwise(values) if values.is_contiguous() and not half_to_float else None


def _log_softmax_backward(gradient: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Tensor | None:
    is_usual = gradient.is_contiguous() and output.is_contiguous() and dtype == gradient.dtype == output.dtype
    return _elementwise(gradient, output) if is_usual else None


SHAPES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((_aten.neg.default, _aten.rsqrt.default, _aten.cos.default, _aten.sin.default), _elementwise),
    **dict.fromkeys((_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor), _elementwise),
    **dict.fromkeys((_aten.mul.Scalar, _aten.div.Scalar, _aten.pow.Tensor_Scalar), _elementwise),
    **dict.fromkeys((_aten.silu.default, _aten.silu_backward.default), _elementwise),
    **dict.fromkeys((_aten.mean.dim, _aten.sum.dim_IntList), _reduced),
    _aten.arange.default: _arange,
    **dict.fromkeys((_aten.empty_like.default, _aten.ones_like.default, _aten.zeros_like.default), _like),
    _aten.add_.Tensor: _in_place,
    _aten.cat.default: _concatenated,
    _aten.mm.default: _product,
    _aten.embedding.default: lambda weight, indices, *_: _new(weight, *indices.shape, weight.shape[1]),
    _aten.embedding_dense_backward.default: lambda gradient, _, rows, *__: _new(gradient, rows, gradient.shape[-1]),
    _aten.slice_backward.default: lambda gradient, sizes, *_: _new(gradient, *sizes),
    _aten._log_softmax.default: _log_softmax,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
    _aten.nll_loss_forward.default: lambda values, _, weight, reduction, __: (
        (_new(values), _new(values)) if values.is_meta and weight is None and reduction else None
    ),
    _aten.nll_loss_backward.default: lambda _, values, *__: _elementwise(values) if values.is_contiguous() else None,
}
"""Operator -> function of its arguments."""
