"""Masks keep exactly the configured ratio, scores are trained through them, and schedules match their formulas."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_zero.config import resolve
from hf_zero.extras.compression.schedule import (
    bits_at,
    block_sums,
    exact_share,
    first_scores,
    is_pruning_due,
    n_of_m_mask,
    number_kept,
    ratio_at,
    spread_blocks,
    top_mask,
    trained_mask,
)
from hf_zero.extras.compression.section import SparseShared, TechniqueGroup
from tests.extras.compression.models import ds_config


@settings(max_examples=300, deadline=None)
@given(
    scores=st.lists(st.integers(-3, 3), min_size=1, max_size=60),
    hundredths=st.integers(1, 100),
)
def test_exactly_the_largest_are_kept(scores: list[int], hundredths: int) -> None:
    """As with a stable sort: of equal scores the first is kept."""
    ratio, values = hundredths / 100, torch.tensor(scores, dtype=torch.float32)
    keep = math.ceil(Fraction(hundredths, 100) * len(scores))
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:keep]
    expected = torch.zeros(len(scores), dtype=torch.bool)
    expected[best] = True
    assert torch.equal(top_mask(values, ratio), expected)


def test_ratios_are_meant_as_they_are_written() -> None:
    """0.07 * 100 is 7.000000000000001 in floating point, which rounds up to 8."""
    assert number_kept(0.07, 100) == 7
    assert number_kept(0.5, 7) == 4
    assert number_kept(1e-9, 5) == 1


def test_all_scores_get_the_gradient_of_the_mask() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0, 0.0], requires_grad=True)
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0])
    mask = trained_mask(scores, 0.5)
    assert mask.tolist() == [1, 0, 1, 0]
    (mask * weight).sum().backward()
    assert scores.grad is not None and scores.grad.tolist() == [1, 2, 3, 4]


def test_first_scores_choose_what_is_large() -> None:
    sizes = torch.rand(40)
    scores = first_scores(sizes, (40, 1), "layer.row_mask_scores")
    assert scores.shape == (40, 1) and scores.abs().max() <= 1
    assert torch.equal(top_mask(scores.view(-1), 0.25), top_mask(sizes, 0.25))
    assert torch.equal(scores, first_scores(sizes, (40, 1), "layer.row_mask_scores"))


def test_blocks() -> None:
    values = torch.arange(16.0).view(4, 4)
    assert block_sums(values, (4, 1)).tolist() == [[24, 28, 32, 36]]
    mask = spread_blocks(torch.tensor([[True, False]]), (2, 3))
    assert mask.tolist() == [[True] * 3 + [False] * 3] * 2


def test_n_of_m() -> None:
    mask = n_of_m_mask(torch.tensor([[1.0, 4, 3, 2, 5, 5, 5, 5]]), 2, 4)
    assert mask.tolist() == [[False, True, True, False, True, True, False, False]]


def test_bits_fall_ever_more_slowly() -> None:
    rule = TechniqueGroup(path="a", modules=("*",), start_bits=12, bits=8, period=10)
    at = {updates: bits_at(rule, updates) for updates in (0, 9, 10, 19, 20, 39, 40, 79, 80, 1000)}
    assert [now.bits for now in at.values()] == [12, 12, 11, 11, 10, 10, 9, 9, 8, 8]
    assert [now.since for now in at.values()] == [0, 0, 10, 10, 20, 20, 40, 40, 80, 80]


def test_a_period_of_0_is_all_bits_at_once() -> None:
    """DeepSpeedExamples' configs have `"quantization_period": 0`, which was rejected."""
    at_once = {"start_bits": 12, "target_bits": 4, "quantization_period": 0}
    section = {"shared_parameters": {"enabled": True}, "different_groups": {"all": {"params": at_once}}}
    policy = resolve(ds_config(weight_quantization=section), world_size=1).extras["compression"]
    (rule,) = policy.techniques["weight_quantization"].rules
    assert bits_at(rule, 0).bits == 4


def test_soft_transition() -> None:
    assert [exact_share(0.25, since) for since in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert exact_share(None, 0) == 0.0


def test_snip_prunes_step_by_step() -> None:
    policy = SparseShared(schedule_offset=10, method="snip_momentum", schedule_offset_stride=4, schedule_offset_end=20)
    assert [updates for updates in range(30) if is_pruning_due(policy, updates)] == [10, 14, 18, 20]
    assert ratio_at(policy, 0.25, 10) == 1.0
    assert ratio_at(policy, 0.25, 15) == pytest.approx(0.5)
    assert ratio_at(policy, 0.25, 20) == ratio_at(policy, 0.25, 99) == 0.25
