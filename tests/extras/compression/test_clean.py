"""redundancy_clean: a smaller model with the logits of the masked one, which loads without hf_zero."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import WrongArgument
from hf_zero.extras.compression.clean import clean
from hf_zero.extras.compression.compressed_model import compression_of
from hf_zero.extras.compression.export import init_compression, redundancy_clean
from tests.extras.compression.models import (
    EIGHT_BITS,
    HEADS,
    ROWS,
    SPARSE,
    bert_batches,
    ds_config,
    group,
    technique,
    tiny_bert,
    tiny_gpt2,
)
from tests.support.models import tiny_llama

IDS = torch.arange(1, 21).view(2, 10)

LLAMA_HEADS = technique(
    group({"dense_ratio": 0.5}, "o_proj", related=[["q_proj", "k_proj", "v_proj"]]),
    num_heads=2,
)
LLAMA_ROWS = technique(group({"dense_ratio": 0.5}, "gate_proj", related=[["up_proj", "down_proj"]]), method="l1")
GPT2_HEADS = technique(group({"dense_ratio": 0.5}, "attn.c_proj", related=[["attn.c_attn"]]), num_heads=4, method="l1")
GPT2_ROWS = technique(group({"dense_ratio": 0.25}, "mlp.c_fc", related=[["mlp.c_proj"]]), method="topk")

# Runs in a new interpreter, where hf_zero cannot be imported.
LOAD = """
import sys, torch
sys.modules["hf_zero"] = None
import transformers
for folder, auto, code in zip(*[iter(sys.argv[1:])] * 3):
    auto = getattr(transformers, auto)
    model = auto.from_pretrained(folder, trust_remote_code=code == "code").eval()
    with torch.no_grad():
        torch.save(model(torch.arange(1, 21).view(2, 10)).logits, folder + "/logits.pt")
"""


Made = tuple[
    Callable[[], Any], dict[str, Any], str, str, float
]  # model, techniques, its Auto class, how it is saved, size
CLASSIFIER, CAUSAL = "AutoModelForSequenceClassification", "AutoModelForCausalLM"
EVERYTHING = {"row_pruning": ROWS, "weight_quantization": EIGHT_BITS, "head_pruning": HEADS}
SMALLER: dict[str, Made] = {
    "bert all": (tiny_bert, EVERYTHING, CLASSIFIER, "code", 0.8),
    "llama heads and rows": (
        tiny_llama, {"head_pruning": LLAMA_HEADS, "row_pruning": LLAMA_ROWS}, CAUSAL, "plain", 0.75,
    ),
    "bert rows": (tiny_bert, {"row_pruning": ROWS}, CLASSIFIER, "plain", 0.9),
    "bert heads": (tiny_bert, {"head_pruning": HEADS}, CLASSIFIER, "code", 0.9),
    "gpt2 rows": (tiny_gpt2, {"row_pruning": GPT2_ROWS}, CAUSAL, "plain", 0.75),
    "gpt2 heads": (tiny_gpt2, {"head_pruning": GPT2_HEADS}, CAUSAL, "code", 0.95),
}  # fmt: skip


def test_smaller_with_the_same_logits(tmp_path: Path) -> None:
    masked, words = {}, []
    for name, (make, techniques, auto, code, smaller) in SMALLER.items():
        folder = tmp_path / name
        masked[folder] = made_smaller(make, techniques, code, smaller, folder)
        words += [str(folder), auto, code]
    environment = {**os.environ, "HF_ZERO": "0", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, "-c", LOAD, *words], check=True, env=environment, timeout=200)
    for folder, logits in masked.items():
        torch.testing.assert_close(torch.load(folder / "logits.pt"), logits, rtol=0, atol=1e-5)


def made_smaller(
    make: Callable[[], Any], techniques: dict[str, Any], code: str, smaller: float, folder: Path
) -> torch.Tensor:
    """Cleans and saves the model; returns the logits of the masked one."""
    model = make().eval()
    before = sum(parameter.numel() for parameter in model.parameters())
    init_compression(model, ds_config(**techniques))
    with torch.no_grad():
        masked = model(IDS).logits
    redundancy_clean(model, ds_config(**techniques))
    assert compression_of(model) is None and not any(module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, masked, rtol=0, atol=1e-5)
    assert sum(parameter.numel() for parameter in model.parameters()) < smaller * before
    model.save_pretrained(folder)
    assert (folder / "modeling_compressed.py").exists() == (code == "code")
    return masked


def test_config_says_what_the_model_is() -> None:
    model = tiny_llama()
    techniques = {"head_pruning": LLAMA_HEADS, "row_pruning": LLAMA_ROWS}
    redundancy_clean(init_compression(model, ds_config(**techniques)), ds_config(**techniques))
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (3, 1, 6)
    assert config.intermediate_size == 35


def test_sizes_are_as_expected() -> None:
    """Half the rows of an MLP are half of its weights, also on disk."""
    model: Any = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    config = ds_config(row_pruning=technique(group({"dense_ratio": 0.5}, "^0$", related=[["^2$"]])))
    init_compression(model, config)
    x = torch.randn(4, 8)
    masked = model(x)
    redundancy_clean(model, config)
    torch.testing.assert_close(model(x), masked, rtol=0, atol=1e-5)
    assert model[0].weight.shape == (16, 8) and model[2].weight.shape == (8, 16) and model[0].out_features == 16


def test_channels_with_batch_norm() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    model[1].running_mean.normal_()
    model[1].bias.data.zero_()
    model[1].running_mean.zero_()  # a dropped channel stays zero through the norm
    config = ds_config(channel_pruning=technique(group({"dense_ratio": 0.5}, "^0$", related=[["^1$", "^3$"]])))
    init_compression(model, config)
    x = torch.randn(1, 3, 9, 9)
    with torch.no_grad():
        masked = model(x)
        redundancy_clean(model, config)
        torch.testing.assert_close(model(x), masked, rtol=0, atol=1e-5)
    assert model[0].weight.shape[0] == 4 and model[1].num_features == 4 and model[3].in_channels == 4


def test_without_related_modules_zeros_stay() -> None:
    model = tiny_bert()
    config = ds_config(sparse_pruning=SPARSE)
    redundancy_clean(init_compression(model, config), config)
    weight = model.bert.pooler.dense.weight
    assert int(weight.count_nonzero()) == weight.numel() // 2


def test_the_report() -> None:
    model = tiny_bert()
    config = ds_config(row_pruning=ROWS, weight_quantization=EIGHT_BITS)
    init_compression(model, config)
    compressed = compression_of(model)
    assert compressed is not None
    report = clean(compressed)
    dropped = 2 * (12 * 16 + 12 + 16 * 12)  # rows, their biases, the columns that read them; two layers
    assert report.before.num_parameters - report.after.num_parameters == dropped
    assert report.before.num_bytes == 4 * report.before.num_parameters
    assert report.after.num_flops == report.before.num_flops - 2 * 2 * 2 * 12 * 16
    assert report.after.num_packed_bytes < report.after.num_bytes
    assert "parameters" in str(report) and "FLOPs per token" in str(report)


def test_heads_that_keys_do_not_have() -> None:
    section = technique(group({"dense_ratio": 0.5}, "o_proj", related=[["q_proj", "k_proj"]]), num_heads=6)
    section["different_groups"]["only"]["related_modules"] = [["q_proj", "k_proj"]]
    model = tiny_llama()
    init_compression(model, ds_config(head_pruning=section))
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight = nn.Parameter(torch.zeros(10, 36))
    with pytest.raises(WrongArgument, match="num_key_value_heads"):
        redundancy_clean(model, ds_config(head_pruning=section))


def test_a_fresh_model_with_loaded_weights() -> None:
    trained, fresh = tiny_bert(seed=1), tiny_bert(seed=2)
    fresh.load_state_dict(trained.state_dict())
    config = ds_config(row_pruning=ROWS)
    redundancy_clean(init_compression(trained, config), config)
    redundancy_clean(fresh, config)
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), fresh.parameters(), strict=True))
    batch = bert_batches(1)[0]
    torch.testing.assert_close(fresh.eval()(**batch).logits, trained.eval()(**batch).logits)
    assert json.dumps(fresh.config.to_dict()) == json.dumps(trained.config.to_dict())
