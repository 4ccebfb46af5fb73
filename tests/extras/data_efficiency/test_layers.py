"""Random-LTD and progressive layer drop: formulas, gradients against gather and scatter, masks, resuming, saving."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_zero import initialize
from hf_zero.config import ConfigError
from hf_zero.extras.data_efficiency.layers import (
    ProgressiveLayerDrop,
    RandomLTD,
    convert_to_random_ltd,
    keep_probability,
    kept_tokens,
    layer_stack,
    save_without_random_ltd,
    theta_at,
)
from hf_zero.extras.data_efficiency.section import ProgressiveLayerDropSection as LayerDropSection
from hf_zero.extras.data_efficiency.section import RandomLTDPolicy
from hf_zero.features import Progress
from tests.extras.sparse_attention.test_registered import bert, gpt2
from tests.extras.test_sections import LTD
from tests.support.models import tiny_llama

LENGTH, KEPT = 20, 8


def policy(**changes: Any) -> RandomLTDPolicy:
    settings: dict[str, Any] = {
        "num_layers": 4,
        "layer_ids": (1, 2),
        "mask_name": "attention_mask",
        "sequence_first": False,
        "min_tokens": KEPT,
        "max_tokens": 24,
        "total_steps": 10,
        "multiple": 4,
    }
    return RandomLTDPolicy(**{**settings, **changes})


def batch(padded: bool = False, rows: int = 2) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 90, (rows, LENGTH))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 15:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def test_kept_tokens_are_those_of_the_worked_vectors() -> None:
    published = policy(min_tokens=128, max_tokens=2048, total_steps=200000, multiple=16)
    expected = {0: 128, 1: 128, 1666: 128, 1667: 144, 3334: 160, 100000: 1088, 200000: 2048, 300000: 2048}
    assert {step: kept_tokens(published, step) for step in expected} == expected
    small = policy(min_tokens=16, max_tokens=64, total_steps=6, multiple=8)
    assert [kept_tokens(small, step) for step in range(8)] == [16, 24, 32, 40, 48, 56, 64, 64]


class Plain(nn.Module):
    """Layers of numbers only, to compare with torch's own gather and scatter."""

    def __init__(self, sequence_first: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize("sequence_first", [False, True])
def test_gradients_are_those_of_gather_and_scatter(sequence_first: bool) -> None:
    model = Plain()
    reference = copy.deepcopy(model)
    settings = policy(num_layers=3, layer_ids=(1,), sequence_first=sequence_first)
    feature = RandomLTD(settings, [model.layers[1]], batch_size=2)
    feature.before_forward(Progress(step=0), {})
    shape = (LENGTH, 2, 6) if sequence_first else (2, LENGTH, 6)
    hidden = torch.randn(shape)
    indices = feature._draw(0, 2, LENGTH, KEPT, hidden.device)
    assert indices.shape == (2, KEPT) and (indices.diff(dim=1) > 0).all() and not indices[0].equal(indices[1])
    model(hidden).square().sum().backward()
    dim = 0 if sequence_first else 1
    places = (indices.T if sequence_first else indices)[..., None].expand(*([KEPT, 2] if dim == 0 else [2, KEPT]), 6)
    between = reference.layers[0](hidden)
    between = between.scatter(dim, places, reference.layers[1](between.gather(dim, places)))
    reference.layers[2](between).square().sum().backward()
    for mine, other in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(mine.grad, other.grad)
    assert list(model.state_dict()) == list(reference.state_dict())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", [tiny_llama, gpt2, bert])
def test_models_of_transformers(kind: Any, attention: str) -> None:
    """All tokens give the plain model; fewer train, with padding; recomputed layers draw the same; eval is plain."""
    model = kind().train()
    model.set_attn_implementation(attention)
    plain = model(**batch(True)).loss
    feature = RandomLTD(policy(num_layers=2, layer_ids=(1,)), layer_stack(model)[1:], batch_size=2)
    feature.before_forward(Progress(step=100), {})
    assert torch.equal(model(**batch(True)).loss, plain)
    feature.before_forward(Progress(step=0), {})
    losses, gradients = [], []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = model(**batch(True)).loss
        loss.backward()
        losses.append(loss)
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert not torch.equal(losses[0], plain) and torch.equal(*losses)
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)
    assert torch.equal(model.eval()(**batch(True)).loss, plain)
    feature.close()
    assert "forward" not in vars(layer_stack(model)[1])


def config(**sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 1}},
        **sections,
    }


def routed(stage: int = 2, **changes: Any) -> dict[str, Any]:
    schedule = {
        **LTD["random_ltd_schedule"],
        "max_value": LENGTH,
        "schedule_config": {"require_steps": 6, "seq_per_step": 4},
    }
    section = {**LTD, "random_ltd_schedule": schedule, **changes}
    routing = {"data_routing": {"random_ltd": section}}
    return config(zero_optimization={"stage": stage}, data_efficiency=routing)


def losses_of(engine: Any, number: int) -> list[float]:
    found = []
    for _ in range(number):
        loss = engine(**batch()).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_a_resumed_run_draws_the_same(stage: int, tmp_path: Path) -> None:
    engine = initialize(model=tiny_llama(layers=4), config=routed(stage))[0]
    losses_of(engine, 2)
    engine.save_checkpoint(str(tmp_path))
    expected = losses_of(engine, 3)
    again = initialize(model=tiny_llama(layers=4), config=routed(stage))[0]
    again.load_checkpoint(str(tmp_path))
    assert losses_of(again, 3) == expected
    tokens = again.random_ltd_scheduler
    assert tokens.consumed_layer_tokens == tokens.get_total_layer_tokens(5)


def test_the_rate_by_layer_tokens() -> None:
    """Half of the layer tokens: the schedule advances every other update."""
    section = {"layer_token_lr_schedule": {"enabled": True}, "random_ltd_layer_id": [0, 1, 2, 3]}
    settings = routed(**section, random_ltd_layer_num=4)
    engine = initialize(model=tiny_llama(layers=4), config=settings)[0]
    positions = []
    for _ in range(6):
        losses_of(engine, 1)
        positions.append(engine.lr_scheduler.last_batch_iteration)
    share = [kept / LENGTH for kept in (8, 8, 12, 12, 16, 16)]
    expected = [int(sum(share[: n + 1]) + 1e-9) for n in range(6)]
    assert [position - positions[0] for position in positions] == [n - expected[0] for n in expected]


def test_deepspeeds_calls_around_it() -> None:
    engine = initialize(model=tiny_llama(layers=4), config=routed())[0]
    kind = type(engine.module.model.layers[0])
    assert convert_to_random_ltd(engine, kind) is engine and engine.random_ltd_initialize() is None
    assert list(save_without_random_ltd(engine)) == list(tiny_llama(layers=4).state_dict())
    with pytest.raises(ValueError, match="layers of the model are LlamaDecoderLayer"):
        convert_to_random_ltd(engine, nn.Linear)
    plain = initialize(model=tiny_llama(), config=config())[0]
    with pytest.raises(RuntimeError, match="random_ltd.enabled is not set"):
        convert_to_random_ltd(plain, kind)


def test_models_with_other_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM has 2 layers"):
        initialize(model=tiny_llama(), config=routed())
    with pytest.raises(ConfigError, match="no list of layers"):
        initialize(model=nn.Linear(3, 3), config=config(progressive_layer_drop={"enabled": True}))


def test_layer_drop_formulas() -> None:
    drop = LayerDropSection(theta=0.5, gamma=0.01)
    assert [theta_at(drop, k) for k in (1, 2)] == [1.0, 1.0] and abs(theta_at(drop, 10**6) - 0.5) < 1e-9
    assert theta_at(drop, 102) == pytest.approx(0.5 * 2.718281828**-1 + 0.5)
    assert [keep_probability(0.5, layer, 4) for layer in range(4)] == [1.0, 0.875, 0.75, 0.625]


def test_layers_are_dropped_as_often_as_they_should_be_and_the_mean_stays() -> None:
    model = Plain().train()
    layers = [model.layers[0]]
    hidden = torch.randn(1, 2, 6)
    expected = model.layers[0](hidden)
    feature = ProgressiveLayerDrop(LayerDropSection(theta=0.4, gamma=10.0), [nn.Identity(), *layers])
    total, dropped = torch.zeros_like(expected), 0
    for step in range(2, 2002):
        feature.before_forward(Progress(step=step), {})
        output = model.layers[0](hidden)
        dropped += int(torch.equal(output, hidden))
        total += output.detach()
    assert dropped / 2000 == pytest.approx(0.3, abs=0.03)
    torch.testing.assert_close(total / 2000, expected, rtol=0, atol=0.1)
    assert torch.equal(model.eval().layers[0](hidden), expected)


@pytest.mark.parametrize("stage", [0, 3])
def test_training_with_layer_drop_resumes(stage: int, tmp_path: Path) -> None:
    settings = config(
        zero_optimization={"stage": stage}, progressive_layer_drop={"enabled": True, "theta": 0.2, "gamma": 5.0}
    )
    engine = initialize(model=tiny_llama(layers=4), config=settings)[0]
    losses_of(engine, 3)
    assert engine.training_features.named("progressive_layer_drop").get_theta() == pytest.approx(
        0.2 + 0.8 * 2.718281828**-5
    )
    engine.save_checkpoint(str(tmp_path))
    expected = losses_of(engine, 3)
    again = initialize(model=tiny_llama(layers=4), config=settings)[0]
    again.load_checkpoint(str(tmp_path))
    assert losses_of(again, 3) == expected


class Recomputed(Plain):
    """Layers called under torch's checkpoint, as in older transformers: recomputation calls `forward`."""

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return hidden


def test_recomputed_layers_keep_what_their_forward_has_kept() -> None:
    """A user evaluated between a forward and its backward, with random-LTD and gradient checkpointing.

    Backward raised torch's CheckpointError: recomputed layers took the evaluation for their own forward, and kept all
    tokens.
    """
    gradients = []
    for model in (Plain(), Recomputed()):
        hidden = torch.ones(2, LENGTH, 6)
        plain = model(hidden)
        feature = RandomLTD(policy(num_layers=3), list(model.layers), batch_size=2)
        feature.before_forward(Progress(step=4), {})
        output = model(hidden)
        assert not torch.equal(output, plain)
        feature.before_forward(Progress(step=4, training=False), {})
        assert torch.equal(model.eval()(hidden), plain)
        model.train()
        output.square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)
