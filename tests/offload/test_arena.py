"""A model that is larger than its device, an arena with a limit: its bytes, and the losses of the plain step."""

from __future__ import annotations

import pytest
import torch

from bench.streaming import SIZES, SPLIT, STATES, train
from tests.support.arena import ArenaDevice, OutOfArena, arena

UNITS = 5.5  # of the largest: its row and the whole of it, its gradients, and two that are being reduced


@pytest.mark.lengthy
def test_a_model_larger_than_its_device() -> None:
    """63 million parameters, as many as two loaded cores train twice within a minute; `-m bench.streaming` has more."""
    size = SIZES["60m"]
    plain = train(size, 2, "fp32", streams=False)
    limit = round(UNITS * 2 * plain["unit_numel"])
    assert 3 * limit < 2 * plain["numel"], "the weights alone are three times the device"
    found = train(size, 2, "fp32", limit=limit)
    assert found["losses"] == plain["losses"]
    assert found["host_bytes"] / found["numel"] == pytest.approx(SPLIT + STATES["fp32"], rel=1e-3)
    assert plain["host_bytes"] / plain["numel"] == pytest.approx(14.0, rel=1e-3)
    assert found["gradient_numel"] <= 2 * found["unit_numel"], "the one being applied, and the next"


def test_the_arena_counts_what_the_device_makes() -> None:
    kept = torch.ones(100)
    with arena(1000, [kept]) as device:
        assert device.num_bytes == 400
        other = kept * 2
        assert device.num_bytes == 800
        view = other[:50]
        assert device.num_bytes == 800
        del other, view
        assert device.num_bytes == 400
        kept.untyped_storage().resize_(800)
        assert device.num_bytes == 800
        with pytest.raises(OutOfArena, match="1200 bytes of 1000"):
            torch.zeros(100)
    assert device.peak == 1200
    assert ArenaDevice().has_own_memory
