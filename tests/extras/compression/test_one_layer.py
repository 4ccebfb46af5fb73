"""What single layers offer, and techniques on one of them, by hand (test_compressed_layers.py has them in models)."""

from __future__ import annotations

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_zero.extras.compression.matching import Layer, layers_of
from hf_zero.extras.compression.pruning import PrunedChannels, PrunedHeads, SnipWeights, WeightBits
from hf_zero.extras.compression.section import HeadShared, SparseShared, TechniqueGroup, WeightShared

HALF = TechniqueGroup(path="group", modules=("*",), dense_ratio=0.5)
L1 = HeadShared(schedule_offset=0, method="l1", num_heads=2)


def _linear(rows: list[list[float]]) -> Layer:
    module = nn.Linear(len(rows[0]), len(rows))
    with torch.no_grad():
        module.weight.copy_(torch.tensor(rows))
        module.bias.fill_(1.0)
    (layer,) = layers_of(module)
    return layer


def test_what_can_be_compressed() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 5), "b": Conv1D(5, 3), "c": nn.Conv2d(2, 4, 1), "e": nn.LayerNorm(3)})
    model["d"] = nn.Embedding(7, 2)
    model["a"].add_module("lora_A", nn.Linear(3, 1))
    layers = {layer.name: layer for layer in layers_of(model)}
    assert layers.pop("d").kind == "embedding"
    found = {name: (layer.kind, layer.num_out, layer.num_in) for name, layer in layers.items()}
    assert found == {"a": ("linear", 5, 3), "b": ("linear", 5, 3), "c": ("conv", 4, 2)}
    attention = {layer.name: layer for layer in layers_of(nn.MultiheadAttention(4, 2))}
    assert not attention["out_proj"].takes_inputs and attention["in_proj_weight"].kind == "packed"


def test_bits_of_a_weight_fall_and_begin_when_they_are_due() -> None:
    rule = TechniqueGroup(path="a", modules=("*",), start_bits=9, bits=8)
    bits = WeightBits(_linear([[1.0, 0.4], [0.2, -1.0]]), rule, WeightShared(schedule_offset=2))
    weight = bits.layer.parameter.detach()
    assert bits.advance(0) is None and torch.equal(bits.apply(weight), weight)
    bits.advance(2)
    assert bits.is_on and bits.now.bits == 9 and not torch.equal(bits.apply(weight), weight)
    changed = bits.advance(3)
    assert changed is not None and changed.bits == 8


def test_heads_are_blocks_of_inputs_and_biases_stay() -> None:
    heads = PrunedHeads(_linear([[1.0, 1.0, 4.0, 0.0]]), HALF, L1)
    assert heads.problem() is None and heads.head_size == 2 and heads.scores_shape() == (1, 2)
    heads.fix(heads.layer.parameter, 0)
    assert heads.weight_factor(heads.final_mask()).tolist() == [[False, False, True, True]]
    assert heads.bias_factor(heads.final_mask()) is None


def test_channels_are_filters() -> None:
    (layer,) = layers_of(nn.Conv2d(2, 4, 3))
    channels = PrunedChannels(layer, HALF, L1)
    assert channels.scores_shape() == (4, 1, 1, 1)
    assert channels.weight_factor(torch.ones(4)).shape == (4, 1, 1, 1)


def test_snip_momentum_remembers_gradients() -> None:
    """A block's score is 0.9 of the old one and the sum of |weight * gradient|; large scores may be pruned."""
    policy = SparseShared(schedule_offset=0, method="snip_momentum", block_pattern="2x1", schedule_offset_end=2)
    snip = SnipWeights(_linear([[9.0, 1.0], [9.0, 1.0]]), HALF, policy)
    weight = snip.layer.parameter.detach()
    snip.follow(weight, torch.tensor([[0.0, 1.0], [0.1, 1.0]]))
    snip.follow(weight, torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    assert snip.score is not None
    torch.testing.assert_close(snip.score, torch.tensor([[0.81, 2.8]]))
    snip.fix(weight, 2)
    assert snip.final_mask().tolist() == [[False, True], [False, True]] and not snip.follows
    snip.mask = None
    snip.resume(None, 2)
    assert snip.follows and snip.needs_mask(3)
