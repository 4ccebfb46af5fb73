"""Tensor-parallel training equals that of one plain process: losses, norms, weights."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch

from hf_zero.comm.parts import held_part
from hf_zero.params import partitioning
from hf_zero.params.store import of
from hf_zero.tensor import layers, shard
from tests.support.ranks import run_ranks
from tests.tensor.training import RATE, batches, compare, config_with, model_of
from tests.tiling.test_models import small

TOLERANCE = 1e-5
Found = dict[str, tuple[float, ...]]
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def _all(rank: int, tensor: int, world: int, kinds: tuple[str, ...], stages: tuple[int, ...], steps: int) -> Found:
    return {
        f"{kind}, stage {stage}": compare(rank, kind, stage, tensor, world=world, steps=steps)
        for kind, stage in itertools.product(kinds, stages)
    }


def _check(tensor: int, world: int, kinds: tuple[str, ...], stages: tuple[int, ...], steps: int) -> None:
    for found in run_ranks(_all, world, tensor, world, kinds, stages, steps):
        assert {name: worst for name, worst in found.items() if max(worst) > TOLERANCE} == {}


def test_two_ranks_train_as_one_process() -> None:
    _check(2, 2, ("llama", "gpt2"), (0, 1, 2), 4)


def test_four_ranks_train_as_one_process() -> None:
    _check(2, 4, ("uneven", "mixtral"), (2, 3), 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mixtral", "phi3", "uneven"])
@pytest.mark.parametrize(("tensor", "world"), [(2, 2), (4, 4), (2, 4)])
def test_every_kind_trains_as_one_process(kind: str, tensor: int, world: int) -> None:
    _check(tensor, world, (kind,), (0, 1, 2, 3), 20)


def _of_zero_init(rank: int) -> Found:
    model, cut = model_of("mixtral"), []
    deepspeed.zero.Init(model, config_dict_or_path=config_with(3, 2))

    def make_plain(handle: Any) -> None:
        assert all(of(parameter) is not None for parameter in model.parameters())  # those before are sharded again
        cut.append(handle)
        partitioning.make_plain(handle)

    with mock.patch.object(shard, "make_plain", make_plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        deepspeed.initialize(model=model, optimizer=optimizer, config=config_with(3, 2))[0].destroy()
    assert len(cut) == sum(held_part(parameter) is not None for parameter in model.parameters()) > 0
    kinds = ("qwen3", "mixtral", "gpt2")  # with tied weights, with experts, without a plan
    return {kind: compare(rank, kind, 3, 2, world=4, steps=2, sharded=True) for kind in kinds}


def test_models_that_zero_init_has_sharded() -> None:
    """A model built under `zero.Init` was refused, because it was not whole. Now its matrices are, one by one."""
    for found in run_ranks(_of_zero_init, 4):
        assert {name: worst for name, worst in found.items() if max(worst) > TOLERANCE} == {}


def _otherwise(rank: int, steps: int, kind: str) -> Found:
    """Other training features; bf16 rounds weights, activations and gradients."""
    dropout = [] if kind != "gpt2" else [("dropout", {}), ("attention", {})]
    return {
        "three accumulated": compare(rank, kind, 2, 2, world=2, steps=steps, accumulated=3),
        "optimizer on the host": compare(
            rank, kind, 2, 2, world=2, steps=steps, zero_optimization=OFFLOAD, zero_force_ds_cpu_optimizer=False
        ),
        **{why: compare(rank, f"{kind}, {why}", 1, 2, world=2, steps=steps, **more) for why, more in dropout},
        "bf16": compare(rank, kind, 1, 2, world=2, steps=steps, bf16={"enabled": True}),
    }


def _check_otherwise(steps: int, kind: str) -> None:
    both = run_ranks(_otherwise, 2, steps, kind)
    assert both[0] == both[1]
    for found in both:
        assert max(found.pop("attention", (0,))) < 1  # ranks draw for their own heads, in step with each other
        assert max(found.pop("bf16")) < 0.1
        assert {name: worst for name, worst in found.items() if max(worst) > TOLERANCE} == {}


def test_accumulation_offload_dropout_and_bf16() -> None:
    _check_otherwise(2, "gpt2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mixtral"])
def test_accumulation_offload_dropout_and_bf16_for_long(kind: str) -> None:
    _check_otherwise(20, kind)


def _accumulates(rank: int, kinds: tuple[str, ...], steps: int) -> Found:
    return {
        f"{kind}, stage {stage}": compare(rank, kind, stage, 2, world=4, steps=steps, accumulated=3)
        for kind, stage in itertools.product(kinds, (0, 1, 2, 3))
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mixtral"])
def test_three_accumulated_on_two_data_ranks(kind: str) -> None:
    for found in run_ranks(_accumulates, 4, (kind,), 20):
        assert {name: worst for name, worst in found.items() if max(worst) > TOLERANCE} == {}


def _in_tiles(rank: int) -> tuple[Found, float]:
    """Also returns the largest difference of logits, if a program reads them in training."""
    tiles = {"tiled_mlp": True, "tiled_loss": True}
    with small():
        with mock.patch.object(layers, "gather", side_effect=AssertionError("whole logits")):
            found = {f"stage {s}": compare(rank, "llama", s, 2, world=2, steps=2, hf_zero=tiles) for s in (1, 3)}
        model, batch = model_of("llama"), batches(1)[0]
        plain = model(**batch)
        torch.autograd.backward(plain.logits.square().mean())
        expected = model.model.layers[0].input_layernorm.weight.grad
        model = model_of("llama")
        engine = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), config=config_with(1, 2, hf_zero=tiles)
        )[0]
        engine.backward(engine(**batch).logits.square().mean())
        seen = deepspeed.utils.safe_get_full_grad(engine.module.model.layers[0].input_layernorm.weight)
    return found, (seen - expected).abs().max().item()


def test_tiles_of_a_loss_whose_head_is_cut() -> None:
    """A user set hf_zero.tiled_loss together with tensor_parallel.autotp_size.

    The first forward failed with "The expanded size of the tensor (1488) must match the existing size (2928)": the head
    returned logits that were still to be computed, and the wrapper of a partitioned head took them for its part of the
    vocabulary.
    """
    for found, difference in run_ranks(_in_tiles, 2):
        assert {name: worst for name, worst in found.items() if max(worst) > TOLERANCE} == {}
        assert difference < TOLERANCE
