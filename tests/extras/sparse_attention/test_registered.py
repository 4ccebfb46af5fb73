"""Sparse attention in models of transformers: the same results as eager attention with the pattern's mask."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from hf_zero import initialize
from hf_zero.config import ConfigError
from hf_zero.extras.sparse_attention.registered import NAME, attach, switch_on
from hf_zero.extras.sparse_attention.sparsity import BSLongformerSparsityConfig, FixedSparsityConfig, SparsityConfig
from tests.extras.sparse_attention.test_gathered import TOLERANCE, token_mask
from tests.support.models import tiny_llama, tiny_llama_config

LENGTH, BLOCK, VOCABULARY = 42, 4, 90


def bert() -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=64,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0
    )
    return GPT2LMHeadModel(config)


MODELS: dict[str, Any] = {"llama": tiny_llama, "bert": bert, "gpt2": gpt2}
HEADS = {"llama": 6, "bert": 4, "gpt2": 4}


def batch(padded: bool) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH))
    mask = torch.ones_like(ids)
    labels = ids.clone()
    if padded:
        mask[1, 30:] = 0
        labels[1, 30:] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def masked_4d(sparsity: SparsityConfig, heads: int, given: dict[str, Tensor], causal: bool) -> dict[str, Tensor]:
    """The same batch with an explicit full mask, for eager attention."""
    layouts = sparsity.head_rows(-(-LENGTH // sparsity.block))
    allowed = token_mask(layouts, heads, sparsity.block, LENGTH).expand(2, -1, -1, -1).clone()
    if causal:
        allowed &= torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    allowed &= given["attention_mask"].bool()[:, None, None, :]
    # Rows without any visible key would be NaN; they are padding, and no label is predicted from them.
    empty = ~allowed.any(-1, keepdim=True)
    scores = torch.zeros(allowed.shape).masked_fill(~(allowed | empty), torch.finfo(torch.float32).min)
    return {**given, "attention_mask": scores}


def loss_and_gradients(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = model(**given).loss
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_losses_and_gradients_are_those_of_eager_attention_under_the_mask(kind: str, padded: bool) -> None:
    sparse, heads = MODELS[kind](), HEADS[kind]
    plain = copy.deepcopy(sparse)
    plain.set_attn_implementation("eager")
    sparsity = FixedSparsityConfig(heads, BLOCK, True, num_different_global_patterns=4)
    given = batch(padded)
    switch_on(sparse, sparsity)
    loss, found = loss_and_gradients(sparse, given)
    reference, expected = loss_and_gradients(plain, masked_4d(sparsity, heads, given, causal=kind != "bert"))
    torch.testing.assert_close(loss, reference, rtol=TOLERANCE, atol=TOLERANCE)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def test_dense_layouts_change_nothing_and_undoing_either() -> None:
    model = tiny_llama()
    before = model(**batch(True)).loss
    undo = switch_on(model, FixedSparsityConfig(6, 64, num_local_blocks=4))
    assert model.config._attn_implementation == NAME
    torch.testing.assert_close(model(**batch(True)).loss, before)
    undo()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(**batch(True)).loss, before)


def test_decoding_with_a_cache_is_dense() -> None:
    """One new query attends to all earlier keys, as without the pattern; only the prompt is processed sparsely."""
    model = tiny_llama().eval()
    switch_on(model, BSLongformerSparsityConfig(6, BLOCK))
    out = model.generate(torch.arange(3, 23)[None], max_new_tokens=4, do_sample=False)
    assert out.shape == (1, 24)


def test_attention_dropout_and_checkpointed_layers() -> None:
    torch.manual_seed(0)
    config = tiny_llama_config()
    config.attention_dropout = 0.3
    model = LlamaForCausalLM(config).train()
    switch_on(model, FixedSparsityConfig(6, BLOCK))
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)
        model.zero_grad()
        gradients.append(loss_and_gradients(model, batch(False))[1])
        gradients[-1] = {name: value.clone() for name, value in gradients[-1].items()}
    for name, value in gradients[0].items():
        torch.testing.assert_close(value, gradients[1][name])


def test_a_model_without_a_pattern_says_so() -> None:
    model = tiny_llama()
    undo = switch_on(model, FixedSparsityConfig(6))
    undo()
    model.set_attn_implementation(NAME)
    with pytest.raises(RuntimeError, match='has attn_implementation="hf_zero_sparse" but no pattern'):
        model(**batch(False))
    attach(model, FixedSparsityConfig(4, BLOCK, True, num_different_global_patterns=2))
    with pytest.raises(ValueError, match="layouts are for 4 heads, but the model has 6"):
        model(**batch(False))


SECTION = {"mode": "fixed", "block": BLOCK, "num_local_blocks": 4, "num_random_blocks": 3}


def config(**sections: Any) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "sparse_attention": SECTION, **sections}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_section_alone_switches_it_on(stage: int, tmp_path: Path) -> None:
    """It needs no call other than initialize, and the saved model does not mention it."""
    model = tiny_llama()
    expected = copy.deepcopy(model)
    switch_on(expected, FixedSparsityConfig(6, BLOCK))
    reference = expected(**batch(False)).loss
    engine = initialize(model=model, config=config(zero_optimization={"stage": stage}))[0]
    loss = engine(**batch(False)).loss
    torch.testing.assert_close(loss, reference, rtol=TOLERANCE, atol=TOLERANCE)
    engine.backward(loss)
    engine.step()
    engine.destroy()
    assert model.config._attn_implementation == "sdpa"


def test_models_that_cannot_are_refused_by_the_section_name() -> None:
    with pytest.raises(ConfigError, match="(?s)sparse_attention.*no config.num_attention_heads"):
        initialize(model=nn.Linear(4, 4), config=config())
    assert initialize(model=nn.Linear(4, 4), config=config(sparse_attention={}))[0]
