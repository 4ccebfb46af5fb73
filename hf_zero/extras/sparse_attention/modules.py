"""DeepSpeed's SparseSelfAttention and BertSparseSelfAttention, for models that build their own attention, and its
SparseAttentionUtils, which convert a transformers model to longer sequences and sparse attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_zero.extras.sparse_attention.gathered import (
    BlockPlan,
    Entries,
    Rules,
    entries_of,
    gathered_attention,
    make_plan,
)
from hf_zero.extras.sparse_attention.registered import NAME, attach, register, switch_on
from hf_zero.extras.sparse_attention.sparsity import FixedSparsityConfig, SparsityConfig

MaskMode = Literal["add", "mul"]


class SparseSelfAttention(nn.Module):
    """Self-attention over the blocks of a pattern.

    Args:
        sparsity_config: default: FixedSparsityConfig for four heads.
        key_padding_mask_mode: "add": the padding mask is added to the scores; "mul": 0 masks a key.
        attn_mask_mode: the same for `attn_mask`.
        max_seq_length: length for which the pattern is computed; shorter sequences use its upper left corner.

    `master_layout`: the pattern, int64 [H, n, n].
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: MaskMode = "add",
        attn_mask_mode: MaskMode = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        super().__init__()
        for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
            if mode not in ("add", "mul"):
                raise ValueError(f'SparseSelfAttention({name}={mode!r}): must be "add" or "mul"')
        self.sparsity_config = sparsity_config or FixedSparsityConfig(num_heads=4)
        self.key_padding_mask_mode = key_padding_mask_mode
        self.attn_mask_mode = attn_mask_mode
        self.register_buffer("master_layout", self.sparsity_config.make_layout(max_seq_length))
        self._plans: dict[int, BlockPlan] = {}

    def get_layout(self, length: int) -> Tensor:
        """The pattern of a sequence of `length` tokens."""
        block = self.sparsity_config.block
        num_blocks = -(-length // block)
        if num_blocks > self.master_layout.shape[1]:
            raise ValueError(
                f"a sequence of {length} tokens is longer than max_seq_length = {self.master_layout.shape[1] * block}: "
                "create the module with a larger one"
            )
        return self.master_layout[:, :num_blocks, :num_blocks]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """[B, H, S, D] each -> [B, H, S, D].

        Args:
            rpe: added to the scores, [S, S] or with heads and samples in front.
            key_padding_mask: [B, S].
            attn_mask: [S, S].

        Raises:
            NotImplementedError: if query, key and value differ in shape.
        """
        if not query.shape == key.shape == value.shape:
            raise NotImplementedError(
                f"SparseSelfAttention: query {tuple(query.shape)}, key {tuple(key.shape)} and value "
                f"{tuple(value.shape)} must have the same shape (self-attention)"
            )
        added = [] if rpe is None else [rpe]
        if key_padding_mask is not None:
            added.append(_as_scores(key_padding_mask, self.key_padding_mask_mode)[:, None, None, :])
        if attn_mask is not None:
            added.append(_as_scores(attn_mask, self.attn_mask_mode))
        rules = Rules(added=_sum(added, query.dtype) if added else None)
        return gathered_attention(query, key, value, self._plan(query.shape[1], query.shape[2]), rules)

    def _plan(self, num_heads: int, length: int) -> BlockPlan:
        if length not in self._plans:
            layout = self.get_layout(length)
            if num_heads != layout.shape[0]:
                raise ValueError(f"the pattern is for {layout.shape[0]} heads, but query has {num_heads}")
            layouts = [tuple(tuple(row.nonzero().flatten().tolist()) for row in head) for head in layout]
            self._plans[length] = make_plan(layouts, num_heads, self.sparsity_config.block)
        return self._plans[length]


class BertSparseSelfAttention(nn.Module):
    """BERT's self-attention with its projections, based on `SparseSelfAttention`.

    Args:
        config: must have hidden_size and num_attention_heads.
    """

    def __init__(self, config: Any, sparsity_config: SparsityConfig | None = None) -> None:
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size {config.hidden_size} is not a multiple of "
                f"num_attention_heads {config.num_attention_heads}"
            )
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        pattern = sparsity_config or FixedSparsityConfig(num_heads=config.num_attention_heads)
        self.sparse_self_attention = SparseSelfAttention(pattern)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """[B, S, hidden] -> [B, S, hidden]; `attention_mask` is added to the scores, [B, 1, 1, S] or [B, S]."""
        heads = (self.num_attention_heads, self.attention_head_size)
        query, key, value = (
            project(hidden_states).unflatten(-1, heads).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        padding = None if attention_mask is None else attention_mask.reshape(attention_mask.shape[0], -1)
        attended = self.sparse_self_attention(query, key, value, key_padding_mask=padding)
        mixed: Tensor = attended.transpose(1, 2).flatten(2)
        return mixed


def _as_scores(mask: Tensor, mode: MaskMode) -> Tensor:
    if mode == "add" and mask.dtype != torch.bool:
        return mask
    allowed = mask != 0
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~allowed, float("-inf"))


def _sum(tables: list[Tensor], dtype: torch.dtype) -> Entries:
    """A function that returns entries of the sum of tables that broadcast to [B, H, S, S], without computing all."""

    def entries(queries: Tensor, keys: Tensor, heads: tuple[int, ...]) -> Tensor:
        total = torch.zeros((), dtype=dtype, device=queries.device)
        for table in tables:
            total = total + entries_of(table)(queries, keys, heads)
        return total.clamp(min=torch.finfo(dtype).min)

    return entries


Padded = tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_RESERVED_ROWS = {"roberta": 2}  # unused rows at the start of the position table


class SparseAttentionUtils:
    """Namespace of DeepSpeed's utility functions."""

    @staticmethod
    def extend_position_embedding(model: Any, max_position: int) -> Any:
        """Extend the position embeddings of BERT or RoBERTa to `max_position` positions by repeating them.

        Raises:
            ValueError: if the model has another type, or its table is already that long.
        """
        kind = getattr(model.config, "model_type", type(model).__name__)
        if kind not in ("bert", "roberta"):
            raise ValueError(f"extend_position_embedding: {kind} is not supported, only bert and roberta")
        reserved = _RESERVED_ROWS.get(kind, 0)
        embeddings = model.base_model.embeddings
        old = embeddings.position_embeddings.weight.data
        known = old.shape[0] - reserved
        if max_position <= known:
            raise ValueError(f"extend_position_embedding: max_position={max_position} must be more than {known}")
        repeats = -(-max_position // known)
        table = torch.cat([old[:reserved], old[reserved:].repeat(repeats, 1)[:max_position]])
        embeddings.position_embeddings.weight = nn.Parameter(table, old.requires_grad)
        embeddings.position_embeddings.num_embeddings = table.shape[0]
        for name in ("position_ids", "token_type_ids"):
            buffer = getattr(embeddings, name, None)
            if isinstance(buffer, Tensor):
                longer = torch.arange(table.shape[0], device=buffer.device)[None]
                setattr(embeddings, name, longer if name == "position_ids" else torch.zeros_like(longer))
        model.config.max_position_embeddings = table.shape[0]
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Set the maximum length of the tokenizer to `max_position` tokens."""
        tokenizer.model_max_length = max_position
        getattr(tokenizer, "init_kwargs", {})["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Any, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> Any:
        """Use the pattern in every self-attention of the model; weights do not change.

        Raises:
            ValueError: if the model does not support attention implementations by name.
        """
        model.config.max_position_embeddings = max(max_position, model.config.max_position_embeddings)
        pattern = sparsity_config or FixedSparsityConfig(num_heads=model.config.num_attention_heads)
        switch_on(model, pattern)
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[nn.Module], sparsity_config: SparsityConfig | None = None
    ) -> Iterable[nn.Module]:
        """Use the pattern in single layers, which must belong to a model with this `config`."""
        register()
        pattern = sparsity_config or FixedSparsityConfig(num_heads=config.num_attention_heads)
        config._attn_implementation_internal = NAME
        for layer in layers:
            attach(layer, pattern)
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> Padded:
        """Pad the five tensors to a multiple of `block_size`. Returns (number of added tokens, the tensors).

        hf_zero's sparse attention does not need this padding.
        """
        inputs = input_ids if input_ids is not None else inputs_embeds
        if inputs is None:
            raise ValueError("pad_to_block_size: give input_ids or inputs_embeds")
        missing = -inputs.shape[1] % block_size
        if not missing:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if inputs_embeds is not None:
            filler = inputs_embeds.new_full((inputs_embeds.shape[0], missing), pad_token_id, dtype=torch.long)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(filler)], dim=-2)
        ids = None if input_ids is None else functional.pad(input_ids, (0, missing), value=pad_token_id)
        mask, types, positions = (
            None if tensor is None else functional.pad(tensor, (0, missing), value=0)
            for tensor in (attention_mask, token_type_ids, position_ids)
        )
        return missing, ids, mask, types, positions, inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        return sequence_output[:, : sequence_output.shape[1] - pad_len]
