"""Optimizers of ds.json in the engine: shards of any stage compared with one unpartitioned process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from hf_zero import initialize
from tests.step.test_parity import ROWS, config, split
from tests.support.models import AwkwardMLP, mlp_batches
from tests.support.ranks import run_ranks

STEPS = 10
KINDS: dict[str, dict[str, Any]] = {
    "Lamb": {"type": "Lamb", "params": {"lr": 0.02, "weight_decay": 0.1}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 0.05}},
    "SGD": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "nesterov": True}},
    "CPUAdam": {"type": "CPUAdam", "params": {"lr": 0.01}},
    "Muon": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.01}},
}

Masters = dict[tuple[str, int], torch.Tensor]  # by parameter, and start of the part in it


def run_kind(rank: int, world: int, stage: int, kind: str, sections: dict[str, Any]) -> Masters:
    """The weights after some steps, gathered by the engine."""
    model = AwkwardMLP()
    settings = config(stage, world, optimizer=KINDS[kind], gradient_clipping=0.5, **sections)
    engine, _, _, _ = initialize(model=model, config=settings)
    for batch in mlp_batches(STEPS, ROWS):
        mine = {key: value.to(engine.module.inner.weight.dtype) for key, value in split(batch, rank, world).items()}
        engine.backward(engine(**mine, flag=False))
        engine.step()
    masters: Masters = {}
    for shard in engine.optimizer.sub_groups:
        for piece in shard.pieces:
            name = engine.optimizer.store.layout.specs[piece.parameter].name
            masters[name, piece.in_parameter] = shard.master.narrow(0, piece.in_shard, piece.numel).clone()
    return masters


def run_all_kinds(rank: int, world: int, stage: int) -> dict[str, Masters]:
    """One engine after the other."""
    return {kind: run_kind(rank, world, stage, kind, {}) for kind in KINDS}


@functools.cache
def of_one_process() -> dict[str, Masters]:
    return run_ranks(run_all_kinds, 1, 1, 0)[0]


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 3), (3, 2), pytest.param(0, 2, marks=pytest.mark.slow)])
def test_shards_as_one_process(stage: int, world: int) -> None:
    by_rank = run_ranks(run_all_kinds, world, world, stage)
    for kind, expected in of_one_process().items():
        whole = {name: value for (name, start), value in expected.items() if start == 0}
        seen = set()
        for masters in by_rank:
            for (name, start), part in masters[kind].items():
                reference = whole[name].narrow(0, start, part.numel())
                torch.testing.assert_close(
                    part, reference, rtol=2e-4, atol=2e-5, msg=lambda text, kind=kind: f"{kind}: {text}"
                )
                seen.add(name)
        assert seen == set(whole), kind


@pytest.mark.parametrize("kind", ["Lamb", "Muon"])
def test_in_bf16_too(kind: str) -> None:
    """Forward uses the rounded weights; masters stay close to those of one process."""
    (expected,) = run_ranks(run_kind, 1, 1, 0, kind, {"bf16": {"enabled": True}})
    for masters in run_ranks(run_kind, 2, 2, 2, kind, {"bf16": {"enabled": True}}):
        for (name, start), part in masters.items():
            reference = expected[name, 0].narrow(0, start, part.numel())
            # Muon scales up small singular values, and their rounding errors with them.
            assert float((part - reference).norm()) <= 0.1 * float(reference.norm()) + 1e-3
