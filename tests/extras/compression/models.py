"""Sections of ds.json and tiny models for tests of compression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

BERT_OUT = "attention.output.dense"
BERT_QKV = ["self.query", "self.key", "self.value"]


def group(params: dict[str, Any], *modules: str, related: Sequence[Sequence[str]] = ()) -> dict[str, Any]:
    """different_groups with one group."""
    found: dict[str, Any] = {"params": params, "modules": list(modules)}
    if related:
        found["related_modules"] = [list(names) for names in related]
    return {"only": found}


def technique(groups: dict[str, Any], **shared: Any) -> dict[str, Any]:
    """A technique that is enabled from the beginning."""
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": groups}


def ds_config(stage: int = 0, **techniques: Any) -> dict[str, Any]:
    """A complete config."""
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "compression_training": techniques,
    }


def tiny_bert(layers: int = 2, seed: int = 0) -> BertForSequenceClassification:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=40,
                hidden_size=16,
                num_hidden_layers=layers,
                num_attention_heads=4,
                intermediate_size=24,
                max_position_embeddings=12,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
                num_labels=3,
            )
        )


def tiny_gpt2(seed: int = 0) -> GPT2LMHeadModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=12, n_embd=16, n_layer=2, n_head=4))


def bert_batches(count: int, rows: int = 4, seed: int = 5) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "input_ids": torch.randint(1, 40, (rows, 10), generator=generator),
            "labels": torch.randint(0, 3, (rows,), generator=generator),
        }
        for _ in range(count)
    ]


HEADS = technique(group({"dense_ratio": 0.5}, BERT_OUT, related=[BERT_QKV]), num_heads=4)
ROWS = technique(group({"dense_ratio": 0.5}, "intermediate.dense", related=[[r"layer\.\d+\.output\.dense"]]))
EIGHT_BITS = technique(group({"start_bits": 8, "target_bits": 8}, "encoder"), quantize_groups=4)
EIGHT_BIT_INPUTS = technique(group({"bits": 8}, "encoder"), range_calibration="static", quantization_type="asymmetric")
SPARSE = technique(group({"dense_ratio": 0.5}, "encoder", "pooler"))
SNIP = {
    "shared_parameters": {
        "enabled": True,
        "schedule_offset": 1,
        "schedule_offset_end": 4,
        "method": "snip_momentum",
        "dense_ratio": 0.5,
        "excluded_modules": ["classifier"],
    }
}
