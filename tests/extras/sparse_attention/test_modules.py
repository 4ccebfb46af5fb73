"""SparseSelfAttention, BertSparseSelfAttention and SparseAttentionUtils under DeepSpeed's names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import RobertaConfig, RobertaModel

from hf_zero.extras.sparse_attention.modules import BertSparseSelfAttention, SparseAttentionUtils, SparseSelfAttention
from hf_zero.extras.sparse_attention.sparsity import FixedSparsityConfig
from tests.extras.sparse_attention.test_gathered import TOLERANCE, dense, inputs, token_mask
from tests.extras.sparse_attention.test_registered import NAME, bert

BLOCK = 4


def test_masks_of_padding_and_tokens_and_relative_positions() -> None:
    pattern = FixedSparsityConfig(3, BLOCK)
    module = SparseSelfAttention(pattern, max_seq_length=64)
    tensors = inputs(2, 3, 3, 30)
    corner = [tuple(tuple(k for k in row if k < 8) for row in pattern.rows(16)[:8])]
    allowed = token_mask(corner, 3, BLOCK, 30)
    torch.testing.assert_close(module(*tensors), dense(*tensors, allowed), rtol=TOLERANCE, atol=TOLERANCE)
    padding, tokens, bias = torch.zeros(2, 30), torch.ones(30, 30).tril(), torch.randn(30, 30)
    padding[1, 20:] = -10000.0
    found = module(*tensors, rpe=bias, key_padding_mask=padding, attn_mask=tokens)
    expected = dense(*tensors, allowed & tokens.bool(), bias + padding[:, None, None])
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    other = SparseSelfAttention(pattern, key_padding_mask_mode="mul", attn_mask_mode="add", max_seq_length=64)
    found = other(*tensors, key_padding_mask=padding == 0, attn_mask=bias)
    expected = dense(*tensors, allowed & (padding == 0)[:, None, None], bias)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_what_cannot_be_attended_is_refused() -> None:
    module = SparseSelfAttention(max_seq_length=32)
    assert module.master_layout.shape == (4, 2, 2)
    query, key, value = inputs(1, 4, 4, 16)
    with pytest.raises(NotImplementedError, match="must have the same shape"):
        module(query, key[:, :, :8], value)
    with pytest.raises(ValueError, match="longer than max_seq_length = 32"):
        module(*inputs(1, 4, 4, 40))
    with pytest.raises(ValueError, match="pattern is for 4 heads, but query has 2"):
        module(*inputs(1, 2, 2, 16))
    with pytest.raises(ValueError, match='must be "add" or "mul"'):
        SparseSelfAttention(attn_mask_mode="or")  # type: ignore[arg-type]


def test_bert_self_attention() -> None:
    config = SimpleNamespace(hidden_size=24, num_attention_heads=3)
    module = BertSparseSelfAttention(config, FixedSparsityConfig(3, BLOCK))
    hidden = torch.randn(2, 16, 24)
    mask = torch.zeros(2, 1, 1, 16)
    mask[0, ..., 8:] = -10000.0
    changed = hidden.clone()
    changed[0, 8:] = 7.0
    found, again = module(hidden, mask), module(changed, mask)
    assert found.shape == hidden.shape
    torch.testing.assert_close(found[0, :8], again[0, :8])
    with pytest.raises(ValueError, match="not a multiple"):
        BertSparseSelfAttention(SimpleNamespace(hidden_size=25, num_attention_heads=3))


def test_position_tables_grow_by_repeating() -> None:
    model = bert()
    before = model.bert.embeddings.position_embeddings.weight.detach().clone()
    SparseAttentionUtils.extend_position_embedding(model, 150)
    after = model.bert.embeddings.position_embeddings.weight
    assert after.shape[0] == model.config.max_position_embeddings == 150
    assert torch.equal(after, before.repeat(3, 1)[:150])
    SparseAttentionUtils.replace_model_self_attention_with_sparse_self_attention(
        model, 150, FixedSparsityConfig(4, BLOCK)
    )
    assert model.config._attn_implementation == NAME
    assert model(torch.randint(0, 90, (1, 141))).logits.shape[1] == 141
    with pytest.raises(ValueError, match="must be more than 150"):
        SparseAttentionUtils.extend_position_embedding(model, 100)


def test_robertas_reserved_rows_stay() -> None:
    config = RobertaConfig(
        vocab_size=90,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=24,
        max_position_embeddings=34,
    )
    model = RobertaModel(config)
    before = model.embeddings.position_embeddings.weight.detach().clone()
    SparseAttentionUtils.extend_position_embedding(model, 80)
    after = model.embeddings.position_embeddings.weight
    assert torch.equal(after, torch.cat([before[:2], before[2:].repeat(3, 1)[:80]]))
    assert model(torch.randint(4, 90, (1, 80))).last_hidden_state.shape[1] == 80
    model.config.model_type = "gpt2"
    with pytest.raises(ValueError, match="only bert and roberta"):
        SparseAttentionUtils.extend_position_embedding(model, 100)


def test_padding_to_blocks_and_back() -> None:
    ids = torch.randint(0, 9, (2, 13))
    given: list[Any] = [ids, torch.ones_like(ids), torch.ones_like(ids), None, None]
    number, padded, mask, types, positions, embeds = SparseAttentionUtils.pad_to_block_size(8, *given, 1, None)
    assert number == 3 and positions is None and embeds is None
    assert padded is not None and mask is not None and types is not None
    assert padded[:, 13:].eq(1).all() and mask[:, 13:].eq(0).all() and types[:, 13:].eq(0).all()
    assert SparseAttentionUtils.unpad_sequence_output(3, padded).shape == (2, 13)
    table = torch.nn.Embedding(9, 4)
    _, _, _, _, _, embeds = SparseAttentionUtils.pad_to_block_size(8, None, None, None, None, table(ids), 1, table)
    assert embeds is not None and torch.equal(embeds[:, 13:], table(torch.ones(2, 3, dtype=torch.long)))
    assert SparseAttentionUtils.pad_to_block_size(13, *given, 1, None)[0] == 0
    with pytest.raises(ValueError, match="give input_ids or inputs_embeds"):
        SparseAttentionUtils.pad_to_block_size(8, None, None, None, None, None, 1, None)


def test_tokenizers_and_single_layers() -> None:
    tokenizer = SimpleNamespace(model_max_length=512, init_kwargs={"model_max_length": 512})
    SparseAttentionUtils.update_tokenizer_model_max_length(tokenizer, 2048)
    assert tokenizer.model_max_length == tokenizer.init_kwargs["model_max_length"] == 2048
    model = bert()
    layers = model.bert.encoder.layer
    SparseAttentionUtils.replace_self_attention_layer_with_sparse_self_attention_layer(
        model.config, layers, FixedSparsityConfig(4, BLOCK)
    )
    assert model(torch.randint(0, 90, (1, 40))).logits.shape[1] == 40
