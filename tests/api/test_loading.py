"""Loads full weights into a model that an engine trains, as load_best_model_at_end does with saved weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_zero.api.gathered_parameters import load_whole
from tests.api.test_outside_forward import BOTH, Net, engine_of, step
from tests.support.ranks import run_each, run_ranks


def other_weights() -> dict[str, Tensor]:
    return {name: value + 0.5 for name, value in Net().state_dict().items()}


def _loads(rank: int, limits: dict[str, int], stage: int) -> None:
    engine = engine_of(limits, stage=stage)
    step(engine)
    found = load_whole(engine.module, other_weights())
    assert not found.missing_keys and not found.unexpected_keys
    whole = engine.module_state_dict()
    assert all(torch.equal(whole[name], value) for name, value in other_weights().items())
    step(engine)  # masters were updated: a step continues from the new weights
    moved = engine.module_state_dict()
    for name, value in other_weights().items():
        assert 0.0 < (moved[name] - value).abs().max() < 0.2, name


def test_every_rank_takes_its_part_and_masters_follow() -> None:
    run_each(_loads, 2, [({}, 1), *((limits, 3) for limits in BOTH)])


def _refuses(rank: int) -> None:
    engine = engine_of({})
    before = engine.module_state_dict()
    weights = other_weights()
    with pytest.raises(RuntimeError, match=r"do not fit Net: scale has the shape \(2,\), the model's \(\)"):
        load_whole(engine.module, {**weights, "scale": torch.zeros(2)}, strict=False)
    del weights["scale"]
    with pytest.raises(RuntimeError, match="do not fit Net: missing: scale; unexpected: more"):
        load_whole(engine.module, {**weights, "more": torch.zeros(1)})
    after = engine.module_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    found = load_whole(engine.module, {**weights, "more": torch.zeros(1)}, strict=False)
    assert found.missing_keys == ["scale"] and found.unexpected_keys == ["more"]


def test_what_does_not_fit_is_named_before_anything_is_written() -> None:
    run_ranks(_refuses, 2)
