"""Models whose constructors copy, read or write parameters, built under zero.Init: as without it, and sharded."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations

from hf_zero.api.gathered_parameters import gathered
from hf_zero.api.zero_init import Init
from tests.support.ranks import run_each, run_ranks


class Pair(nn.Module):
    """A query encoder, and a key encoder made from it in some way."""

    def __init__(self, made: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        self.key = made(self.query)
        for parameter in self.key.parameters():
            parameter.requires_grad = False


def fresh() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def by_data(query: nn.Module) -> nn.Module:
    key = fresh()
    for mine, others in zip(key.parameters(), query.parameters(), strict=True):
        mine.data.copy_(others.data)
    return key


def by_state(query: nn.Module) -> nn.Module:
    key = fresh()
    key.load_state_dict(query.state_dict())
    return key


def by_file(query: nn.Module) -> nn.Module:
    stored = io.BytesIO()
    torch.save(query.state_dict(), stored)
    stored.seek(0)
    key = fresh()
    key.load_state_dict(torch.load(stored))
    return key


def by_weight(query: nn.Module) -> nn.Module:
    key = nn.ModuleList([nn.Linear(3, 3)])
    weight = query.get_parameter("0.weight")
    key.weight = nn.Parameter(copy.deepcopy(weight))
    key.half_weight = nn.Parameter(weight.detach()[:2].clone())
    key.turned = nn.Parameter(weight.t().contiguous())
    key.register_buffer("all", parameters_to_vector(query.parameters()).detach())
    key.register_buffer("wide", weight.double().detach())
    key.ema = {name: value.clone() for name, value in query.state_dict().items()}
    return key


def initialized(query: nn.Module) -> nn.Module:
    key = fresh()
    for parameter in (*query.parameters(), *key.parameters()):
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)
        parameter.data.add_(1)
    return key


def parametrized(query: nn.Module) -> nn.Module:
    layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
    parametrizations.weight_norm(layers[0])
    parametrizations.spectral_norm(layers[1])
    nn.utils.weight_norm(layers[2])
    return layers


def small(name: str) -> nn.Module:
    import transformers as hf

    backbone = hf.ResNetConfig(embedding_size=4, hidden_sizes=[4] * 4, depths=[1] * 4, out_features=["stage4"])
    given = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    given |= {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "num_queries": 3}
    options: dict[str, Any] = {"use_timm_backbone": False, "backbone": None, "backbone_config": backbone}
    if name == "dab_detr":
        return hf.DabDetrForObjectDetection(hf.DabDetrConfig(**options, **given, hidden_size=8))
    backbone.out_features = ["stage2", "stage3", "stage4"]
    if name == "deformable_detr":
        config = hf.DeformableDetrConfig(**options, **given, d_model=32, with_box_refine=True, two_stage=True)
        return hf.DeformableDetrForObjectDetection(config)
    channels = {"encoder_in_channels": [16] * 3, "decoder_in_channels": [32] * 3, "feat_strides": [8, 16, 32]}
    resnet = hf.RTDetrResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 16, 16], depths=[1] * 4, layer_type="basic")
    resnet.out_features = backbone.out_features
    sizes = {"d_model": 32, "encoder_hidden_dim": 32}
    return hf.RTDetrV2ForObjectDetection(hf.RTDetrV2Config(**given, **channels, **sizes, backbone_config=resnet))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8), 2),
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8), 2),
    "list": lambda: nn.ModuleList([nn.Sequential(copy.deepcopy(nn.ModuleList([nn.Linear(3, 3)]))) for _ in range(2)]),
    **{
        made.__name__: lambda made=made: Pair(made)
        for made in (copy.deepcopy, by_data, by_state, by_file, by_weight, initialized, parametrized)
    },
}
DETECTORS = ("dab_detr", "deformable_detr", "rt_detr_v2")


def run_build(rank: int, name: str, precision: dict[str, Any]) -> None:
    build = MODELS[name] if name in MODELS else lambda: small(name)
    torch.manual_seed(0)
    expected: Any = build()
    torch.manual_seed(rank)  # rank 0's values count
    with Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}, **precision}):
        model: Any = build()
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters()), "not sharded"
    assert all(not parameter.hf_zero_shard.is_available for parameter in model.parameters()), "left gathered"
    trained = [parameter.requires_grad for parameter in expected.parameters()]
    assert trained == [parameter.requires_grad for parameter in model.parameters()]
    with gathered(model):
        found = model.state_dict()
        assert list(found) == list(expected.state_dict())
        compared = expected.state_dict()
        if name == "parametrized":  # each rank has drawn its own vectors, in buffers
            compared = {key: compared[key] for key, _ in expected.named_parameters()}
        for key, value in compared.items():
            torch.testing.assert_close(found[key].to(value.dtype), value, rtol=2e-2 if precision else 0, atol=1e-2)
    if name == "by_weight" and not precision:
        assert all(torch.equal(value, expected.key.ema[key]) for key, value in model.key.ema.items())


@pytest.mark.at_once
def test_a_model_that_copies_its_layers_is_built_as_without_sharding() -> None:
    """`nn.TransformerEncoder` copies the layer that it is given, a momentum encoder the query encoder, a box head the
    one before: under zero.Init the layer was sharded already when it had been assigned, and the copy raised "cannot be
    copied here". Reads of a module's attribute gathered, all others (`parameters()`, `state_dict()`) did not."""
    run_each(run_build, 2, [(name, {}) for name in MODELS])


@pytest.mark.slow
def test_other_models_that_copy_their_layers() -> None:
    run_each(run_build, 2, [(name, {}) for name in DETECTORS])
    run_each(run_build, 2, [(name, {"bf16": {"enabled": True}}) for name in MODELS if name != "parametrized"])


def run_refused_after(rank: int) -> None:
    with Init(config_dict_or_path={"train_batch_size": 2, "zero_optimization": {"stage": 3}}):
        model: Any = Pair(copy.deepcopy)
    with pytest.raises(RuntimeError, match="cannot be copied here"):
        copy.deepcopy(model.query)
    with pytest.raises(RuntimeError, match="cannot be read here"):
        model.query.state_dict()["0.weight"].clone()


def test_after_the_context_reads_are_refused_again() -> None:
    run_ranks(run_refused_after, 2)
