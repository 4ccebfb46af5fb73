"""Inputs of the TRL runs: a tiny Llama, a tokenizer trained on the spot, and rows for each method."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"
# Any of these many tokens ends a sequence, so that a newly initialised model ends at many different lengths.
LAST_TOKENS = list(range(2, 34))
ANIMALS = ["fox", "owl", "bear", "newt", "heron", "lynx", "carp", "moth"]
PLACES = ["wood", "river", "old barn", "moor", "town", "marsh"]
EVALUATED = 8


@cache
def sentences(count: int) -> tuple[str, ...]:
    """Learnable text of different lengths."""
    return tuple(
        f"The {ANIMALS[i % len(ANIMALS)]} lives in the {PLACES[i % len(PLACES)]}{', so it does' * (i % 4)}."
        for i in range(count)
    )


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: no text is out of vocabulary."""
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=[END, PAD], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(sentences(64), trainer=trainer)
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token=END, pad_token=PAD)


def config(**options: Any) -> LlamaConfig:
    """Sizes that no number of ranks divides evenly."""
    return LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=36,
        intermediate_size=70,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=tokenizer().eos_token_id,
        eos_token_id=tokenizer().eos_token_id,
        pad_token_id=tokenizer().pad_token_id,
        **options,
    )


def language_model(seed: int = 0) -> LlamaForCausalLM:
    """The same seed gives the same weights; `eos_token_id` of its generation config is a long list."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config())
    model.generation_config.eos_token_id = [tokenizer().eos_token_id, *LAST_TOKENS]
    return model


def reward_model(seed: int = 5) -> LlamaForSequenceClassification:
    """One score per sequence."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForSequenceClassification(config(num_labels=1))


def rows(method: str, count: int) -> list[dict[str, Any]]:
    """The rows that the trainer of a method reads."""
    texts = sentences(count)
    halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
    if method == "sft":
        return [{"text": text} for text in texts]
    if method in ("dpo", "reward"):
        return [{"prompt": head, "chosen": tail, "rejected": tail[::-1] + "?"} for head, tail in halves]
    if method == "kto":
        return [
            {"prompt": head, "completion": tail[:: 1 if i % 2 else -1], "label": bool(i % 2)}
            for i, (head, tail) in enumerate(halves)
        ]
    return [{"prompt": head} for head, _ in halves]


def write(folder: Path, method: str, count: int) -> None:
    """Writes model, reward model and rows to disk, as a user would have them."""
    folder.mkdir(parents=True, exist_ok=True)
    language_model().save_pretrained(folder / "model")
    reward_model().save_pretrained(folder / "reward_model")
    language_model(seed=7).save_pretrained(folder / "teacher")
    for name in ("model", "reward_model", "teacher"):
        tokenizer().save_pretrained(folder / name)
    (folder / "train.json").write_text(json.dumps(rows(method, count)))
    (folder / "eval.json").write_text(json.dumps(rows(method, EVALUATED)))
