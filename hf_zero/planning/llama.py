"""A Llama of plain torch, for models of which only a number of parameters is known.

Names, shapes and activations are those of transformers' class (a test compares the traces), whose modules take longer
to import than all the rest of a plan takes to make.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass
class LlamaShape:
    """What transformers' `LlamaConfig` says of shapes, by its names."""

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
        """From which transformers makes its own configuration of the same model."""
        return asdict(self) | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


class LlamaRMSNorm(nn.Module):
    """In fp32, as transformers computes it."""

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
        query, key = _rotated(query, key, cos.unsqueeze(1), sin.unsqueeze(1))
        # By its name in torch's module: a trace puts its own there.
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        seen = seen.transpose(1, 2).contiguous()
        return self.o_proj(seen.reshape(*hidden.shape[:-1], -1))  # type: ignore[no-any-return]


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return (query * cos) + (_half_turn(query) * sin), (key * cos) + (_half_turn(key) * sin)


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
            result: Tensor = checkpoint(self._forward, hidden, cos, sin, use_reentrant=False)
            return result
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
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
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


def ForCausalLMLoss(logits: Tensor, labels: Tensor, vocab_size: int) -> Tensor:  # noqa: N802  # what tiles know it by
    """Of the next tokens, in fp32."""
    wide = logits.float()
    following = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return functional.cross_entropy(wide.view(-1, vocab_size), following.view(-1))


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class LlamaForCausalLM(nn.Module):
    """What `planning.model` uses of transformers' class. Weights have no values that mean anything."""

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
        """Not reentrant, whatever is asked for."""
        for layer in self.model.layers:
            layer.checkpoints = True  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, labels: Tensor, use_cache: bool = False) -> Output:
        logits = self.lm_head(self.model(input_ids))
        return Output(self.loss_function(logits, labels, self.config.vocab_size), logits)
