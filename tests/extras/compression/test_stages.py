"""Compression and distillation give the same results at every stage, on one rank or two, with offload, and after
resuming."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import initialize
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.api.zero_init import Init
from hf_zero.comm import get_rank, get_world_size
from hf_zero.extras.compression.compressed_model import compression_of
from hf_zero.extras.compression.export import init_compression, redundancy_clean
from tests.extras.compression.models import (
    EIGHT_BIT_INPUTS,
    EIGHT_BITS,
    HEADS,
    ROWS,
    SNIP,
    bert_batches,
    ds_config,
    tiny_bert,
)
from tests.support.ranks import run_each, run_ranks

STEPS = 5
EVERYTHING = {
    "weight_quantization": {
        **EIGHT_BITS,
        "different_groups": {
            "all": {"params": {"start_bits": 8, "target_bits": 6, "quantization_period": 2}, "modules": ["encoder"]}
        },
    },
    "activation_quantization": EIGHT_BIT_INPUTS,
    "sparse_pruning": SNIP,
    "row_pruning": ROWS,
    "head_pruning": HEADS,
}
STUDENT = {
    "layer_reduction": {"enabled": True, "module_name_prefix": "bert.encoder.layer", "teacher_layer": [1, 3]},
    "row_pruning": ROWS,
}


def _config(stage: int, kind: str) -> dict[str, Any]:
    config = ds_config(stage, **(EVERYTHING if kind == "everything" else STUDENT))
    config["train_micro_batch_size_per_gpu"] = 4 // get_world_size()
    if kind == "student":
        config["hf_zero"] = {"distillation": {"temperature": 2.0, "hidden_weight": 0.5}}
    return config


def _train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    rows = 4 // get_world_size()
    for batch in bert_batches(STEPS)[first:last]:
        part = {key: value[get_rank() * rows : (get_rank() + 1) * rows] for key, value in batch.items()}
        loss = engine(**part).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def run_training(
    rank: int, stage: int, kind: str, folder: str, resumes: bool, sharded: bool, changes: dict[str, Any] | None = None
) -> Any:
    layers = 2 if kind == "everything" else 4
    config = {**_config(stage, kind), **(changes or {})}
    model = tiny_bert(layers)
    if sharded:
        Init(module=model)
    engine = initialize(model=model, config=config)[0]
    losses = _train(engine, 0, 3)
    if resumes:
        engine.save_checkpoint(folder)
        # A teacher is the model as it is given, after resuming as before.
        other = tiny_bert(layers, seed=9 if kind == "everything" else 0)
        engine = initialize(model=other, config=config)[0]
        engine.load_checkpoint(folder)
    losses += _train(engine, 3, STEPS)
    model = engine.module
    compressed = compression_of(model)
    assert compressed is not None
    state = compressed.state_dict()
    with GatheredParameters(list(model.parameters())):
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    redundancy_clean(engine, config)
    with torch.no_grad():
        logits = model.eval()(**bert_batches(1, seed=1)[0]).logits
    return losses, {name: value.tolist() for name, value in weights.items()}, state, logits.tolist()


@functools.cache
def _expected(kind: str) -> Any:
    """At stage 0 on one rank, without a save."""
    (found,) = run_ranks(run_training, 1, 0, kind, "nowhere", False, False)
    return found


Case = tuple[int, str, bool, bool]  # stage, kind, whether it resumes, whether the model is partitioned on creation
BY_RANKS: dict[int, list[Case]] = {
    1: [(1, "everything", False, False), (3, "everything", False, False)],
    2: [
        (2, "everything", True, False),
        (3, "everything", True, True),
        (0, "everything", True, False),
        (2, "student", False, False),
        (3, "student", True, True),
    ],
}


@pytest.mark.parametrize("ranks", BY_RANKS)
def test_the_same_everywhere(ranks: int, tmp_path: Path) -> None:
    cases = [(*case[:2], str(tmp_path / str(n)), *case[2:]) for n, case in enumerate(BY_RANKS[ranks])]
    for (_, kind, *_), found in zip(cases, run_each(run_training, ranks, cases), strict=True):
        _compare(found, _expected(kind))


def _compare(found: list[Any], expected: Any) -> None:
    losses = torch.tensor([one[0] for one in found]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(expected[0]), rtol=1e-4, atol=1e-4)
    for one in found:
        assert list(one[1]) == list(expected[1])
        for name, value in expected[1].items():
            torch.testing.assert_close(torch.tensor(one[1][name]), torch.tensor(value), rtol=1e-3, atol=1e-4)
        assert one[2]["updates"] == STEPS
        for layer, masks in expected[2]["masks"].items():
            for name, mask in masks.items():
                torch.testing.assert_close(one[2]["masks"][layer][name].float(), mask.float(), rtol=1e-3, atol=1e-4)
        for layer, limits in expected[2]["ranges"].items():
            torch.testing.assert_close(one[2]["ranges"][layer], limits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.tensor(one[3]), torch.tensor(expected[3]), rtol=1e-3, atol=1e-3)


def test_the_same_with_offload(tmp_path: Path) -> None:
    optimizer: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
    sections = [{"stage": 2, **optimizer}, {"stage": 3, **optimizer, "offload_param": {"device": "cpu"}}]
    changes = [{"zero_optimization": section} for section in sections]
    cases = [(n, "everything", str(tmp_path / str(n)), True, False, each) for n, each in zip((2, 3), changes)]
    for found in run_each(run_training, 1, cases):
        _compare(found, _expected("everything"))


def test_bf16(tmp_path: Path) -> None:
    """Losses equal those of fp32 except for rounding; masters, masks and ranges are restored exactly."""
    expected, changes = _expected("everything"), {"bf16": {"enabled": True}}
    pairs = [(stage, resumes) for stage in (1, 3) for resumes in (False, True)]
    cases = [(stage, "everything", str(tmp_path / str(stage)), resumes, False, changes) for stage, resumes in pairs]
    (one,), resumed_one, (three,), resumed_three = run_each(run_training, 1, cases)
    for unbroken, resumed in ((one, resumed_one), (three, resumed_three)):
        torch.testing.assert_close(torch.tensor(unbroken[0]), torch.tensor(expected[0]), rtol=0.05, atol=0.02)
        _compare(resumed, unbroken)


def test_init_compression_before_initialize() -> None:
    """A model that has been through init_compression is compressed once, and the engine advances its schedule."""
    model, config = tiny_bert(), ds_config(row_pruning=ROWS)
    init_compression(model, config)
    known = compression_of(model)
    engine = initialize(model=model, config=config)[0]
    assert compression_of(model) is known
    _train(engine, 0, 2)
    assert known is not None and known.updates == 2


def test_a_given_optimizer_gets_the_scores() -> None:
    model = tiny_bert()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    config = ds_config(head_pruning=HEADS)
    del config["optimizer"]
    engine = initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=0.1), config=config)[0]
    compressed = compression_of(model)
    assert compressed is not None and len(compressed.scores()) == 2
    before = [scores.detach().clone() for scores in compressed.scores()]
    _train(engine, 0, 1)
    assert all(not torch.equal(old, new) for old, new in zip(before, compressed.scores(), strict=True))
