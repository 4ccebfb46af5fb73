"""Optimizers of ds.json in the engine: shards of any stage compared with one unpartitioned process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from hf_zero import initialize
from hf_zero.api.parameter_access import safe_get_full_fp32_param
from tests.step.training import ROWS, config, train
from tests.support.models import AwkwardMLP, mlp_batches
from tests.support.ranks import run_each, run_ranks

STEPS = 10
KINDS: dict[str, dict[str, Any]] = {
    "Lamb": {"type": "Lamb", "params": {"lr": 0.02, "weight_decay": 0.1}},
    "Lion": {"type": "Lion", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 0.05}},
    "SGD": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "nesterov": True}},
    "CPUAdam": {"type": "CPUAdam", "params": {"lr": 0.01}},
    "Muon": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 0.01}},
}

Masters = dict[str, torch.Tensor]


def run_kind(rank: int, world: int, stage: int, kind: str, sections: dict[str, Any]) -> Masters:
    """The masters of all ranks after some steps."""
    model = AwkwardMLP()
    settings = config(stage, world, optimizer=KINDS[kind], gradient_clipping=0.5, **sections)
    engine, _, _, _ = initialize(model=model, config=settings)
    train(engine, rank, world, mlp_batches(STEPS, ROWS), alike=True)
    trained = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    return {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in trained.items()}


def run_all_kinds(rank: int, world: int, stage: int) -> dict[str, Masters]:
    """One engine after the other."""
    return {kind: run_kind(rank, world, stage, kind, {}) for kind in KINDS}


@functools.cache
def of_one_process() -> dict[str, Masters]:
    return run_ranks(run_all_kinds, 1, 1, 0)[0]


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 3), (3, 2), pytest.param(0, 2, marks=pytest.mark.slow)])
def test_shards_as_one_process(stage: int, world: int) -> None:
    for found in run_ranks(run_all_kinds, world, world, stage):
        for kind, expected in of_one_process().items():
            assert found[kind].keys() == expected.keys()
            for name, master in found[kind].items():
                torch.testing.assert_close(master, expected[name], rtol=2e-4, atol=2e-5, msg=f"{kind}, {name}")


def test_in_bf16_too() -> None:
    """Forward uses the rounded weights; masters stay close to those of one process."""
    kinds, bf16 = ("Lamb", "Muon"), {"bf16": {"enabled": True}}
    alone, sharded = (
        run_each(run_kind, w, [(w, stage, kind, bf16) for kind in kinds]) for w, stage in ((1, 0), (2, 2))
    )
    for kind, (expected,), ranks in zip(kinds, alone, sharded, strict=True):
        for masters in ranks:
            for name, master in masters.items():
                # Muon scales up small singular values, and their rounding errors with them.
                difference = float((master - expected[name]).norm())
                assert difference <= 0.1 * float(expected[name].norm()) + 1e-3, (kind, name)
