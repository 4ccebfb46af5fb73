"""Memory passes around a step's collectives: hf_zero's are the minimum, FSDP2's are more."""

from __future__ import annotations

import os

import pytest
import torch

from bench.kernel_times import kept
from tests.support import step_passes
from tests.support.passes import Passes, adamw_traffic
from tests.support.ranks import run_ranks
from tests.support.requirements import requires

pytestmark = [requires(modules=("triton",)), pytest.mark.lengthy]


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_our_passes_are_the_fewest(stage: int, micro_batches: int) -> None:
    """Mean, clipping and the cast to bf16 take no pass: the update reads reduced gradients and writes the weights."""
    expected = step_passes.floor(stage, micro_batches)
    found = step_passes.ours(stage, micro_batches)
    assert found.keys() == expected.keys()
    for phase, moved in expected.items():
        assert found[phase] == pytest.approx(moved, abs=0.01), phase


def test_sums_in_fp32_take_no_cast_of_their_own() -> None:
    """Each later micro-batch was cast to fp32 in one pass over memory and added in another."""
    own = 1 / step_passes.WORLD
    found = step_passes.ours(2, 3, "fp32")["reduced gradients, cast or added up"]
    # bf16 is added to fp32 twice. (Meta tensors, all at address 0, hide the conversion of the first to fp32.)
    assert found == pytest.approx((2 * (2 + 4) * own, 2 * 4 * own), abs=0.01)
    local = step_passes.ours(1, 3, "fp32")["gradients into a bucket"]
    assert local == pytest.approx((2 + 2 * (2 + 4), 4 + 2 * 4), abs=0.01)


def measured(_rank: int) -> tuple[step_passes.Table, dict[str, step_passes.Table]]:
    """Runs in a separate process: FSDP2 needs one without a process group, and has a store that no other rank uses."""
    os.environ.pop("TORCH_DIST_INIT_BARRIER", None)
    return step_passes.fsdp2(), step_passes.measure()


@pytest.fixture(scope="module")
def theirs_and_all() -> tuple[step_passes.Table, dict[str, step_passes.Table]]:
    return run_ranks(measured, 1, init=False)[0]


def test_passes_of_fsdp2(theirs_and_all: tuple[step_passes.Table, dict[str, step_passes.Table]]) -> None:
    """It copies what is gathered and what is reduced, and casts both and clips, in separate passes."""
    floor, found = step_passes.floor(3), theirs_and_all[0]
    more = {phase: moved for phase, moved in found.items() if sum(moved) > sum(floor.get(phase, (0, 0))) + 0.02}
    assert more == {
        "gathered rows into parameters": pytest.approx((4.0, 4.0), abs=0.01),
        "gradients into a bucket": pytest.approx((2.0, 2.0), abs=0.01),
        "weights, cast for the gather": (1.0, 0.5),
        "reduced gradients, cast or added up": pytest.approx((0.25, 0.5), abs=0.01),
        "norm": pytest.approx((0.5, 0.0), abs=0.01),
        "clipping": pytest.approx((0.5, 0.5), abs=0.01),
    }


def test_the_page_has_what_is_counted_here(
    theirs_and_all: tuple[step_passes.Table, dict[str, step_passes.Table]],
) -> None:
    """docs/performance.md is written from the stored result."""
    now = {name: {phase: list(moved) for phase, moved in table.items()} for name, table in theirs_and_all[1].items()}
    assert kept()["passes"] == now and kept()["traffic"] == adamw_traffic()


def test_what_is_counted() -> None:
    """Reads of overwritten targets, views, and expanded elements would be easy to count by mistake."""
    with Passes() as passes:
        a, b = torch.zeros(8), torch.ones(1)
        a.view(2, 4).t().copy_(b.expand(4, 2))
        a.add_(a)
        torch.add(a, b, out=a)
        torch._foreach_mul_([a, b], 2.0)
    moved = [(name, read, written) for name, read, written in passes.calls[""] if name not in ("zeros", "ones")]
    assert [entry for entry in moved if entry[0] not in ("zero_", "fill_")] == [
        ("copy_", 4, 32),
        ("add_", 32, 32),
        ("add", 36, 32),
        ("_foreach_mul_", 36, 36),
    ]


def test_passes_of_pytorchs_adamw() -> None:
    """Fused: one pass and two casts; foreach: one or two passes for every operation of the formula."""
    assert adamw_traffic() == {"fused": 40, "foreach": 92}
