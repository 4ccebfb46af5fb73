"""Parts of cleaning, and compression as a training feature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.config import resolve, resolve_extra
from hf_zero.errors import WrongArgument
from hf_zero.extras.compression.clean import (
    CleaningReport,
    DimensionChange,
    clean,
    cut,
    cut_inputs,
    cut_outputs,
    cut_rows,
    describe,
    difference,
    follow,
    save_with_code,
    size_of,
)
from hf_zero.extras.compression.compressed_model import compression_of
from hf_zero.extras.compression.feature import compress, compression_feature
from hf_zero.extras.compression.matching import Match, layers_of
from hf_zero.extras.compression.section import TechniqueGroup
from tests.extras.compression.models import EIGHT_BITS, HEADS, ds_config, tiny_bert

RULE = TechniqueGroup(path="group", modules=("*",))
PREFIX = "bert.encoder.layer"


def _match(model: nn.Module, name: str, *related: str) -> Match:
    layer = next(layer for layer in layers_of(model) if layer.name == name)
    return Match(layer, RULE, tuple((other, model.get_submodule(other)) for other in related))


def test_cut() -> None:
    parameter = nn.Parameter(torch.arange(6.0).view(2, 3), requires_grad=False)
    found = cut(parameter, 1, torch.tensor([0, 2]))
    assert found.tolist() == [[0, 2], [3, 5]] and not found.requires_grad
    linear: Any = nn.Linear(3, 4)
    cut_outputs(linear, torch.tensor([1, 3]))
    cut_inputs(linear, torch.tensor([0]))
    assert (linear.in_features, linear.out_features, tuple(linear.bias.shape)) == (1, 2, (2,))
    norm: Any = nn.BatchNorm2d(4)
    cut_outputs(norm, torch.tensor([1, 3]))
    assert norm.num_features == 2 and norm(torch.ones(1, 2, 1, 1).repeat(2, 1, 1, 1)).shape == (2, 2, 1, 1)
    with pytest.raises(WrongArgument, match="groups=2"):
        cut_inputs(nn.Conv2d(4, 4, 1, groups=2), torch.tensor([0, 1]))


def test_rows_that_a_related_module_does_not_read_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 2))
    with pytest.raises(WrongArgument, match="related module 1 has 3 features, the pruned layer 4"):
        cut_rows(_match(model, "0", "1"), torch.tensor([True, False, True, True]))


def test_a_config_follows_where_it_can() -> None:
    model = tiny_bert()
    for layer in range(2):
        names = f"{PREFIX}.{layer}.intermediate.dense", f"{PREFIX}.{layer}.output.dense"
        cut_rows(_match(model, *names), torch.arange(24) < 12)
    assert follow(model, [DimensionChange(24, 12)]) and model.config.intermediate_size == 12
    cut_outputs(model.get_submodule(f"{PREFIX}.0.intermediate.dense"), torch.arange(6))
    assert not follow(model, [DimensionChange(12, 6)]) and model.config.intermediate_size == 12


def test_code_says_what_no_config_can(tmp_path: Path) -> None:
    model = tiny_bert()
    before = describe(model)
    assert difference(before, describe(model)) == {}
    name = f"{PREFIX}.0.intermediate.dense"
    cut_outputs(model.get_submodule(name), torch.arange(6))
    changed = difference(before, describe(model))
    assert changed == {name: {"shapes": {"weight": [6, 16], "bias": [6]}, "attributes": {"out_features": 6}}}
    save_with_code(model, changed)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["compressed_modules"] == changed
    compile((tmp_path / "modeling_compressed.py").read_text(), "modeling_compressed.py", "exec")


def test_sizes() -> None:
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.LayerNorm(2))
    with torch.no_grad():
        model[0].weight.fill_(0)
    size = size_of(model, {id(model[0].weight): (4, 2)})
    assert (size.num_parameters, size.num_nonzero, size.num_bytes, size.num_flops) == (12, 2, 48, 16)
    assert size.num_packed_bytes == 8 // 2 + 2 * 4 + 4 * 4
    assert "bytes, packed" in str(CleaningReport(size, size))


def test_adapters_count_neither_before_nor_after() -> None:
    """FLOPs of adapters were counted before cleaning, but not after it."""
    model = tiny_bert()
    model.classifier.add_module("lora_A", nn.Linear(16, 2))
    compress(model, resolve_extra(ds_config(weight_quantization=EIGHT_BITS), "compression"))
    compressed = compression_of(model)
    assert compressed is not None
    report = clean(compressed)
    assert report.before.num_flops == report.after.num_flops


def test_a_feature_only_where_it_is_asked_for() -> None:
    plain = resolve({"train_batch_size": 1}, world_size=1)
    assert compression_feature(tiny_bert(), plain) is None
    known = tiny_bert()
    compress(known, resolve_extra(ds_config(head_pruning=HEADS), "compression"))
    feature = compression_feature(known, plain)
    assert feature is not None and "head_pruning" in feature.policy.techniques
    groups: list[dict[str, Any]] = [
        {"params": [known.classifier.weight], "weight_decay": 0.1},
        {"params": [known.classifier.bias], "weight_decay": 0.0},
    ]
    feature.adjust_groups(groups)
    feature.adjust_groups(groups)
    assert len(groups[0]["params"]) == 1 and len(groups[1]["params"]) == 3
