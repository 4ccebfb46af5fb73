"""A model larger than its device, which is an arena with a limit: its bytes, and the losses of plain training."""

from __future__ import annotations

import pytest
import torch

from bench.models import Size
from bench.streaming import SIZES, SPLIT, STATES, in_a_process, plain_losses, train
from tests.support.arena import ArenaDevice, OutOfArena, arena

# In units of the largest: the one in use, the next one, and gradients of the one in use; activations of two tokens and
# persistent parameters are small in comparison.
UNITS = 3.2


@pytest.mark.slow  # test_streaming.py compares its parts, and the next test uses the device
def test_a_model_larger_than_its_device() -> None:
    """63 million parameters, trained with updates during backward, with updates after it, and without an engine."""
    size = SIZES["60m"]
    plain = train(size, 2, "fp32", streams=False)
    limit = round(UNITS * 2 * plain["unit_numel"])
    assert 6 * limit < 2 * plain["numel"], "the weights alone are six times the device"
    found = train(size, 2, "fp32", limit=limit)
    assert found["losses"] == plain["losses"] == plain_losses(size, 2, "fp32")
    assert found["host_bytes"] / found["numel"] == pytest.approx(SPLIT + STATES["fp32"], rel=1e-3)
    assert plain["host_bytes"] / plain["numel"] == pytest.approx(14.0, rel=1e-3)
    assert found["gradient_numel"] <= 2 * found["unit_numel"], "the one being applied, and the next"


@pytest.mark.slow  # the next test does the same with fewer parameters
def test_400_million_parameters_on_a_device_of_130_megabytes() -> None:
    """The device holds a sixth of the weights. This takes 40 seconds on one idle core."""
    size = SIZES["400m"]
    found = train(size, 1, "8bit", limit=130_000_000)
    assert found["numel"] > 400_000_000
    assert found["host_bytes"] / found["numel"] <= 8
    assert found["host_bytes"] / found["numel"] == pytest.approx(SPLIT + STATES["8bit"], rel=1e-3)
    assert found["device_peak"] <= UNITS * 2 * found["unit_numel"]
    assert found["losses"][1] < found["losses"][0]
    assert found["losses"] == plain_losses(size, 1, "8bit")


@pytest.mark.lengthy
@pytest.mark.parametrize("states", ["8bit", pytest.param("fp32", marks=pytest.mark.slow)])
def test_losses_are_those_without_an_engine(states: str) -> None:
    """One update of 13 million parameters, on a device that holds less than a quarter of their weights. The host holds
    weights, gradients and states alone."""
    size = Size(hidden=256, intermediate=688, layers=16, vocabulary=512, batch=1, length=2)
    found = train(size, 1, states, limit=5_700_000)
    assert 4 * 5_700_000 < 2 * found["numel"] < 26_000_000
    assert found["host_bytes"] / found["numel"] == pytest.approx(SPLIT + STATES[states], rel=1e-3)
    assert found["device_peak"] <= (UNITS + 0.3) * 2 * found["unit_numel"], "persistent parameters are no longer small"
    assert found["losses"] == plain_losses(size, 1, states)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_2_billion_parameters_on_a_device_of_300_megabytes() -> None:
    """They take 14 GB and then 12, and five minutes of one idle core."""
    found = in_a_process("2b", 2, "8bit", budget_mb=300)
    assert "failed" not in found, found
    assert found["numel"] > 1_990_000_000
    assert found["host_bytes"] / found["numel"] <= 8
    assert found["host_bytes"] / found["numel"] == pytest.approx(SPLIT + STATES["8bit"], rel=1e-3)
    assert found["device_peak"] <= UNITS * 2 * found["unit_numel"] < 130_000_000
    assert found["losses"] == in_a_process("2b", 2, "8bit", plain=True)["losses"]


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
