"""Unused experts, training experts only, recomputed layers, evaluation, traffic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_zero.comm import ledger
from hf_zero.layout.traffic import ModelSizes, Traffic, Wiring, traffic_of
from tests.experts.training import (
    EXPERTS,
    HIDDEN,
    LAYERS,
    batches,
    bytes_per_token,
    engine_of,
    in_one_process,
    model_of,
)
from tests.support.one_process import Difference, assert_small, differences, train
from tests.support.ranks import run_ranks

TOLERANCE, TOP_K = 1e-5, 2


def _unused(model: Any) -> None:
    """No token is routed to the first two experts, which one of two ranks holds."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.router.bias[:2] = -1e4


def _experts_alone(model: Any) -> None:
    """The input of the first layer's experts needs no gradient, and no token is routed to one rank."""
    _unused(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".experts." in name)


def _recomputed(model: Any) -> None:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _recomputed_by_reentry(model: Any) -> None:
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


CHANGES: tuple[Callable[[Any], None], ...] = (_unused, _experts_alone, _recomputed, _recomputed_by_reentry)


def _trained(rank: int, world: int, stages: list[int], size: int) -> dict[str, Difference]:
    data = batches(3 * world)
    found: dict[str, Difference] = {}
    for change in CHANGES:
        model = model_of("gpt-oss")
        change(model)
        plain = in_one_process(model, data, together=world)
        for stage in stages:
            engine = engine_of(model, stage, size)
            name = f"{change.__name__}, stage {stage}"
            found[name] = differences(train(engine, data), plain.seen_by(rank, world))
            engine.destroy()
    return found


@pytest.mark.parametrize(
    ("world", "size", "stages"), [(2, 2, [2, 3]), pytest.param(4, 2, [1, 2, 3], marks=pytest.mark.slow)]
)
def test_peculiar_models_train_as_one_process(world: int, size: int, stages: list[int]) -> None:
    assert_small(run_ranks(_trained, world, world, stages, size, timeout_s=600))


def _evaluated(rank: int) -> tuple[float, bool, int]:
    """The difference of logits in eval mode; whether a training forward needs gradients; bytes of rows sent by it and
    its backward, including those to this rank itself."""
    model, data = model_of("mixtral"), batches(2)
    engine = engine_of(model, 3, 2)
    model.eval()
    engine.eval()
    with torch.no_grad():
        apart = float((model(**data[rank]).logits - engine(**data[rank]).logits).abs().max())
    engine.train()
    ledger.reset()
    loss = engine(**data[rank]).loss
    engine.backward(loss)
    counts = LAYERS * EXPERTS * 8  # of tokens for each expert, in forward
    sent = sum(tally.num_bytes for (_, name), tally in ledger.tallies.items() if name == "all_to_all")
    return apart, bool(loss.requires_grad), sent - counts


def test_evaluation_and_bytes_on_their_way() -> None:
    """Over all ranks, as many rows are sent back as are sent out, in forward and in backward."""
    told = run_ranks(_evaluated, 2)
    assert all(apart <= TOLERANCE and requires for apart, requires, _ in told)
    rows = bytes_per_token(hidden=HIDDEN, itemsize=4, top_k=TOP_K) * batches(1)[0]["input_ids"].numel() * LAYERS
    assert sum(sent for _, _, sent in told) == len(told) * rows


def _generated(rank: int, stage: int) -> tuple[list[int], list[int]]:
    """The output of this rank for a prompt of its own, with a different length on each rank; and the dense model's."""
    model = model_of("mixtral").eval()
    prompt = batches(2)[rank]["input_ids"][:1, : 3 + rank]
    options: dict[str, Any] = {"max_new_tokens": 4 + 3 * rank, "do_sample": False, "pad_token_id": 0}
    expected: Any = model.generate(prompt, **options)  # type: ignore[operator]
    engine = engine_of(model, stage, 2)
    engine.eval()
    with torch.no_grad():
        found = engine.module.generate(prompt, synced_gpus=True, **options)
    return found[0].tolist(), expected[0].tolist()


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_generate_texts_of_other_lengths(stage: int) -> None:
    """A rank that has finished continues with the others, whose tokens may be routed to its experts."""
    for found, expected in run_ranks(_generated, 2, stage):
        assert found == expected


def test_tokens_are_less_than_the_experts_that_stage_3_gathers() -> None:
    """Mixtral-8x7B on four ranks in bf16, with 8,192 tokens per rank: in each layer 8 experts of three matrices."""
    experts = 8 * 3 * 4096 * 14336
    gathered = Traffic.of(traffic_of(ModelSizes(gathered=experts, trained=experts), Wiring(ranks=4, per_host=4))).total
    tokens = 8192 * bytes_per_token(hidden=4096, itemsize=2, top_k=2, computed_again=True) * 3 // 4
    assert tokens < 0.1 * gathered
