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
from tests.support.one_process import Difference, assert_small, batches, engine_of, sgd
from tests.support.ranks import run_ranks
from tests.tensor.models import model_of
from tests.tensor.training import compare, config_with
from tests.tiling.test_models import small

Found = dict[str, Difference]
OFFLOAD = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def _all(rank: int, tensor: int, world: int, kinds: tuple[str, ...], stages: tuple[int, ...], steps: int) -> Found:
    return {
        f"{kind}, stage {stage}": compare(rank, kind, stage, tensor, world=world, steps=steps)
        for kind, stage in itertools.product(kinds, stages)
    }


def _check(tensor: int, world: int, kinds: tuple[str, ...], stages: tuple[int, ...], steps: int) -> None:
    assert_small(run_ranks(_all, world, tensor, world, kinds, stages, steps))


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
        deepspeed.initialize(model=model, optimizer=sgd(model), config=config_with(3, 2))[0].destroy()
    assert len(cut) == sum(held_part(parameter) is not None for parameter in model.parameters()) > 0
    kinds = ("qwen3", "mixtral", "gpt2")  # with tied weights, with experts, without a plan
    return {kind: compare(rank, kind, 3, 2, world=4, steps=2, in_shards=True) for kind in kinds}


def test_models_that_zero_init_has_sharded() -> None:
    """A model built under `zero.Init` was refused, because it was not whole. Now its matrices are, one by one."""
    assert_small(run_ranks(_of_zero_init, 4))


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


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("gpt2", 2),
        *(pytest.param(kind, 20, marks=pytest.mark.slow) for kind in ("llama", "qwen3", "gpt2", "mixtral")),
    ],
)
def test_accumulation_offload_dropout_and_bf16(kind: str, steps: int) -> None:
    both = run_ranks(_otherwise, 2, steps, kind)
    assert both[0] == both[1]
    assert_small([{"bf16": found.pop("bf16")} for found in both], 0.1)
    if kind == "gpt2":  # ranks draw for their own heads, in step with each other
        assert_small([{"attention": found.pop("attention")} for found in both], 1)
    assert_small(both)


def _accumulates(rank: int, kind: str, steps: int) -> Found:
    return {f"stage {s}": compare(rank, kind, s, 2, world=4, steps=steps, accumulated=3) for s in (0, 1, 2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "mixtral"])
def test_three_accumulated_on_two_data_ranks(kind: str) -> None:
    assert_small(run_ranks(_accumulates, 4, kind, 20))


def _in_tiles(rank: int) -> Found:
    """Also the gradient if a program reads logits in training."""
    tiles = {"tiled_mlp": True, "tiled_loss": True}
    with small():
        with mock.patch.object(layers, "gather", side_effect=AssertionError("whole logits")):
            found: Found = {f"stage {s}": compare(rank, "llama", s, 2, world=2, steps=2, hf_zero=tiles) for s in (1, 3)}
        model, batch = model_of("llama"), batches(1)[0]
        engine = engine_of(model, config_with(1, 2, hf_zero=tiles))
        torch.autograd.backward(model(**batch).logits.square().mean())
        engine.backward(engine(**batch).logits.square().mean())
        seen = deepspeed.utils.safe_get_full_grad(engine.module.model.layers[0].input_layernorm.weight)
        expected = model.model.layers[0].input_layernorm.weight.grad
    return {**found, "logits": (seen - expected).abs().max().item()}


def test_tiles_of_a_loss_whose_head_is_cut() -> None:
    """A user set hf_zero.tiled_loss together with tensor_parallel.autotp_size.

    The first forward failed with "The expanded size of the tensor (1488) must match the existing size (2928)": the head
    returned logits that were still to be computed, and the wrapper of a partitioned head took them for its part of the
    vocabulary.
    """
    assert_small(run_ranks(_in_tiles, 2))
