"""The weights and inputs in each kind of layer's forward, and that the rest of the model does not change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from hf_zero.config import ConfigError
from hf_zero.extras.compression.compressed_model import compression_of
from hf_zero.extras.compression.export import (
    CompressionScheduler,
    compression_scheduler,
    convert_conv1d_to_linear,
    init_compression,
)
from hf_zero.extras.compression.pruning import quantized, quantized_in_range
from hf_zero.extras.compression.schedule import top_mask
from tests.extras.compression.models import bert_batches, ds_config, group, technique, tiny_bert, tiny_gpt2
from tests.support.models import tiny_llama


def _bits(pattern: str = "*", bits: int = 4, **shared: Any) -> dict[str, Any]:
    return ds_config(weight_quantization=technique(group({"target_bits": bits}, pattern), **shared))


@pytest.mark.parametrize(
    ("layer", "inputs", "function"),
    [
        (nn.Linear(6, 4), torch.randn(3, 6), functional.linear),
        (Conv1D(4, 6), torch.randn(3, 6), lambda x, w, b: x @ w + b),
        (nn.Conv2d(2, 4, 3), torch.randn(1, 2, 5, 5), functional.conv2d),
        (nn.Conv1d(2, 4, 3), torch.randn(1, 2, 5), functional.conv1d),
    ],
    ids=["Linear", "Conv1D", "Conv2d", "Conv1d"],
)
def test_weights_of_every_kind_of_layer(layer: nn.Module, inputs: torch.Tensor, function: Any) -> None:
    model: Any = nn.Sequential(layer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    init_compression(model, _bits(quantize_groups=2))
    expected = function(inputs, quantized(before["0.weight"], 4, 2), before["0.bias"])
    torch.testing.assert_close(model(inputs), expected)
    assert list(model.state_dict()) == list(before) and list(model.parameters()) == parameters
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_embeddings_have_a_group_per_row_and_ties_stay() -> None:
    model = tiny_llama(tied=True)
    init_compression(model, _bits("embed_tokens"))
    ids = torch.tensor([[3, 5]])
    torch.testing.assert_close(
        model.model.embed_tokens(ids)[0], quantized(model.model.embed_tokens.weight, 4, 131)[[3, 5]]
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight


class Experts(nn.Module):
    """Several matrices packed in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(3, 4, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,eio->beo", x, self.up_proj)


def test_packed_experts_and_torchs_attention() -> None:
    model: Any = nn.ModuleDict({"experts": Experts(), "attention": nn.MultiheadAttention(4, 2, batch_first=True)})
    init_compression(model, _bits())
    x = torch.randn(2, 4)
    weight = quantized(model.experts.up_proj, 4, 1)
    torch.testing.assert_close(model.experts(x), torch.einsum("bi,eio->beo", x, weight))
    plain = nn.MultiheadAttention(4, 2, batch_first=True)
    plain.load_state_dict(model.attention.state_dict())
    with torch.no_grad():
        plain.in_proj_weight.copy_(quantized(plain.in_proj_weight, 4, 1))
        plain.out_proj.weight.copy_(quantized(plain.out_proj.weight, 4, 1))
    tokens = torch.randn(2, 3, 4)
    torch.testing.assert_close(model.attention(tokens, tokens, tokens)[0], plain(tokens, tokens, tokens)[0])


def test_adapters_are_left_alone() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    init_compression(model, _bits("q_proj"))
    compressed = compression_of(model)
    assert compressed is not None
    assert [match.layer.name.rpartition(".")[2] for match in compressed.matches["weight_quantization"]] == [
        "base_layer"
    ] * 2


def test_masks_in_order_and_their_gradients() -> None:
    """Weight bits, then sparse, then rows; the masked weights get no gradient, the others that of the product. Rows
    that have been chosen by their size stay chosen."""
    model: Any = nn.Sequential(nn.Linear(6, 4))
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    config = ds_config(
        weight_quantization=technique(group({"target_bits": 8}, "*")),
        sparse_pruning=technique(group({"dense_ratio": 0.5}, "*")),
        row_pruning=technique(group({"dense_ratio": 0.5}, "*")),
    )
    init_compression(model, config)
    sparse, rows = top_mask(weight.abs(), 0.5), top_mask(weight.abs().sum(1), 0.5)
    assert int(sparse.sum()) == 12 and int(rows.sum()) == 2
    x = torch.randn(3, 6)
    output = model(x)
    expected = functional.linear(x, quantized(weight, 8, 1) * sparse * rows.view(-1, 1), bias * rows)
    torch.testing.assert_close(output, expected)
    output.sum().backward()
    torch.testing.assert_close(model[0].weight.grad, x.sum(0).expand(4, 6) * sparse * rows.view(-1, 1))
    with torch.no_grad():
        model[0].weight.mul_(torch.where(rows, 0.01, 100.0).view(-1, 1))
    assert torch.equal(model(x).any(0), rows)


def test_scores_are_trained_and_not_saved(tmp_path: Any) -> None:
    model = tiny_bert()
    section = technique(group({"dense_ratio": 0.5}, "intermediate"), method="topk")
    init_compression(model, ds_config(row_pruning=section))
    scores = model.bert.encoder.layer[0].intermediate.dense.row_mask_scores
    assert scores.shape == (24, 1)
    model(**bert_batches(1)[0]).loss.backward()
    assert scores.grad is not None and int(scores.grad.count_nonzero()) > 12
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    assert not any("scores" in name for name in loaded.state_dict())


def test_static_ranges_follow_what_is_seen() -> None:
    """-1..2, then -2..4: 0.95 of the old range and 0.05 of the new one. The first update, whose micro-batches count
    together, only records; later ones also quantize. An evaluation records nothing."""
    model: Any = nn.Sequential(nn.Linear(2, 2))
    section = technique(group({"bits": 8}, "*"), range_calibration="static", quantization_type="asymmetric")
    init_compression(model, ds_config(activation_quantization=section))
    schedule: CompressionScheduler = compression_scheduler(model, None)
    for inputs in (torch.tensor([[-1.0, 0.3]]), torch.tensor([[0.1, 2.0]])):
        torch.testing.assert_close(model(inputs), functional.linear(inputs, model[0].weight, model[0].bias))
    schedule.step()
    inputs = torch.tensor([[-2.0, 4.0]])
    in_range = quantized_in_range(inputs, torch.tensor(-1.0), torch.tensor(2.0), 8, symmetric=False)
    torch.testing.assert_close(model(inputs), functional.linear(in_range, model[0].weight, model[0].bias))
    schedule.step()
    model.eval()
    model(torch.tensor([[-100.0, 100.0]]))
    schedule.step()
    compressed = compression_of(model)
    assert compressed is not None and schedule.training_steps == 3
    found = compressed.layers[0].activation_bits
    assert found is not None and found.range is not None
    torch.testing.assert_close(found.range, torch.tensor([-1.05, 2.1]))


def test_dynamic_ranges_are_per_token() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 2, bias=False))
    init_compression(model, ds_config(activation_quantization=technique(group({"bits": 4}, "*"))))
    x = torch.randn(2, 3, 8) * torch.tensor([[[1.0]], [[100.0]]])
    torch.testing.assert_close(model(x), quantized(x, 4, 6) @ model[0].weight.t())


def test_a_technique_waits_for_its_offset() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    weight, x = model[0].weight.detach().clone(), torch.randn(2, 4)
    section = technique(group({"dense_ratio": 0.25}, "*"))
    section["shared_parameters"]["schedule_offset"] = 2
    init_compression(model, ds_config(sparse_pruning=section))
    schedule = compression_scheduler(model)
    for _ in range(2):
        torch.testing.assert_close(model(x), functional.linear(x, weight, model[0].bias))
        schedule.step(step_zero_check=True)
        schedule.step()
    torch.testing.assert_close(model(x), functional.linear(x, weight * top_mask(weight.abs(), 0.25), model[0].bias))


def test_snip_follows_gradients() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8))
    shared = {"enabled": True, "schedule_offset": 1, "method": "snip_momentum", "dense_ratio": 0.5}
    init_compression(model, ds_config(sparse_pruning={"shared_parameters": shared}))
    schedule = compression_scheduler(model)
    model(torch.randn(16, 4) * torch.tensor([1.0, 1, 50, 50])).square().sum().backward()
    size = (model[0].weight * model[0].weight.grad).abs().detach().view(2, 4, 4).sum(1)
    schedule.before_update()
    schedule.step()
    compressed = compression_of(model)
    assert compressed is not None
    (pruned,) = compressed.pruned()
    assert pruned.mask is not None
    assert torch.equal(pruned.mask[::4], top_mask(size, 0.5))
    assert int(pruned.mask.sum()) == 16


def test_conv1d_becomes_linear() -> None:
    model, same = tiny_gpt2().eval(), tiny_gpt2().eval()
    convert_conv1d_to_linear(same, Conv1D)
    assert isinstance(same.transformer.h[0].attn.c_attn, nn.Linear)
    ids = torch.randint(0, 40, (2, 7))
    torch.testing.assert_close(same(ids).logits, model(ids).logits)


def test_what_does_not_fit_the_model_is_said() -> None:
    with pytest.raises(ConfigError, match=r"must divide the number of elements of .*0.*\(5, 5\)"):
        init_compression(nn.Sequential(nn.Linear(5, 5)), _bits(quantize_groups=2))
    with pytest.raises(ConfigError, match="must divide the 5 inputs"):
        config = ds_config(head_pruning=technique(group({"dense_ratio": 0.5}, "*"), num_heads=2))
        init_compression(nn.Sequential(nn.Linear(5, 5)), config)
    with pytest.raises(ConfigError, match="enables no compression technique"):
        init_compression(nn.Linear(2, 2), ds_config())
