"""DeepSpeed's SparseAttentionUtils: bring a model of transformers to longer sequences and sparse attention."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_zero.attention.registered import NAME, attach, register, switch_on
from hf_zero.attention.sparsity import FixedSparsityConfig, SparsityConfig

Padded = tuple[int, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_RESERVED_ROWS = {"roberta": 2}  # rows of the position table that no position uses


class SparseAttentionUtils:
    """Functions under one name, as DeepSpeed has them."""

    @staticmethod
    def extend_position_embedding(model: Any, max_position: int) -> Any:
        """The table of position embeddings repeats itself until it has `max_position` positions; BERT and RoBERTa.

        Raises:
            ValueError: the model is of another kind, or its table is as long already.
        """
        kind = getattr(model.config, "model_type", type(model).__name__)
        if kind not in ("bert", "roberta"):
            raise ValueError(
                f"extend_position_embedding: {kind} is none of bert, roberta: only their position tables are known"
            )
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
        """The tokenizer cuts at `max_position` tokens."""
        tokenizer.model_max_length = max_position
        getattr(tokenizer, "init_kwargs", {})["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: Any, max_position: int, sparsity_config: SparsityConfig | None = None
    ) -> Any:
        """Every self-attention of the model gets the pattern; its weights stay where they are.

        Raises:
            ValueError: the model does not take attention implementations by name.
        """
        model.config.max_position_embeddings = max(max_position, model.config.max_position_embeddings)
        pattern = sparsity_config or FixedSparsityConfig(num_heads=model.config.num_attention_heads)
        switch_on(model, pattern)
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Iterable[nn.Module], sparsity_config: SparsityConfig | None = None
    ) -> Iterable[nn.Module]:
        """The same for single layers, which must belong to a model with this `config`."""
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
        """(number of tokens added, the five tensors), so that the length is a multiple of `block_size`.

        Our attention needs no padding; this is for models that do.
        """
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("pad_to_block_size: give input_ids or inputs_embeds")
        missing = -given.shape[1] % block_size
        if not missing:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if inputs_embeds is not None:
            filler = inputs_embeds.new_full((inputs_embeds.shape[0], missing), pad_token_id, dtype=torch.long)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(filler)], dim=-2)
        ids = None if input_ids is None else functional.pad(input_ids, (0, missing), value=pad_token_id)
        masks = (
            None if tensor is None else functional.pad(tensor, (0, missing), value=0)
            for tensor in (attention_mask, token_type_ids, position_ids)
        )
        mask, types, positions = masks
        return missing, ids, mask, types, positions, inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: Tensor) -> Tensor:
        """Without the tokens that were added."""
        return sequence_output[:, : sequence_output.shape[1] - pad_len]
