"""Gathers on a separate lane: results are bitwise identical, and every wait between lanes is necessary.

Gathers used to run on the compute stream. On an accelerator a prefetched gather then queued behind all compute that the
host had launched by then, so nothing of it was hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import hf_zero
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.comm.cpu import shared_memory
from hf_zero.device.registry import runtime_of
from hf_zero.device.runtime import DONE, Event, Runtime
from hf_zero.layout import buckets
from hf_zero.params.stand_ins import ReleasedView
from tests.support.late import Deaf, Late, line_of, use
from tests.support.late_gathers import late_gathers
from tests.support.ranks import run_ranks

WIDTH = 8
NOTHING_KEPT = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "sub_group_size": 50,
}
SEVERAL = {**NOTHING_KEPT, "stage3_max_live_parameters": 10_000, "stage3_prefetch_bucket_size": 300}
WAYS: dict[str, dict[str, Any]] = {
    "one ahead": NOTHING_KEPT,
    "several ahead": SEVERAL,
    "none ahead": {**NOTHING_KEPT, "stage3_prefetch_bucket_size": 0},
    "small ones persistent": {**SEVERAL, "stage3_param_persistence_threshold": 12},
    "weights in host memory": {**NOTHING_KEPT, "offload_param": {"device": "cpu"}},
    "all in host memory": {**SEVERAL, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    "updates beside forward": {**NOTHING_KEPT, "offload_optimizer": {"device": "cpu"}},
    "quantized": {**SEVERAL, "zero_quantized_weights": True},
    "kept until backward": {"stage3_param_persistence_threshold": 0},
}
DIRECT = [name for name in WAYS if name not in ("small ones persistent", "quantized")]
WAYS |= {f"{name}, direct": WAYS[name] for name in DIRECT}
"""Direct: on the late device parameters are gathered where they are used, and gradients reduced where they are. Without
biases, whose chunks are too small."""


class Model(nn.Module):
    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH + 2 * number, bias=bias) for number in range(5))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)[:, :WIDTH].tanh()
        return values.square().mean()


def trained(rank: int, way: str) -> list[float]:
    """Losses, with an evaluation and an edit of a weight in between; then all weights, and a view of an earlier one."""
    is_direct = way.endswith(", direct")
    with mock.patch.object(buckets, "MIN_DIRECT_BYTES", 0 if is_direct else buckets.MIN_DIRECT_BYTES):
        return _trained(rank, WAYS[way], is_direct)


def _trained(rank: int, zero: dict[str, Any], is_direct: bool) -> list[float]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, **zero},
    }
    engine, *_ = hf_zero.initialize(model=Model(bias=not is_direct), config=config)
    is_late = isinstance(runtime_of(engine.device), Late)
    parts = [part for unit in engine.module_view.store.units for part in unit.parts]
    reduced = engine.gradients.assembly.step._reducer.buckets
    assert {part.is_direct for part in parts} == {is_direct and is_late}
    assert {bool(bucket.chunks) for bucket in reduced} == {is_direct and is_late}
    numbers = []
    for update in range(6):
        batch = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * update + rank)).bfloat16()
        if update == 3:
            with torch.no_grad():
                numbers.append(engine(batch).item())
            view = engine.module.blocks[1].weight.detach()  # which keeps its memory, if inference keeps the unit
        loss = engine(batch)
        if update == 4:  # between forward and backward, when rows change but no gathered unit is about to be released
            weight = engine.module.blocks[2].weight
            with GatheredParameters([weight], modifier_rank=0):
                weight.data.mul_(1.5)
        engine.backward(loss)
        engine.step()
        numbers.append(loss.item())
    with GatheredParameters(list(engine.module.parameters())):
        for parameter in engine.module.parameters():
            numbers += parameter.float().flatten().tolist()
    engine.destroy()
    return numbers + ([] if isinstance(view, ReleasedView) else view.float().flatten().tolist())


FEW = [
    "one ahead",
    "small ones persistent",
    "all in host memory",
    "updates beside forward",
    "quantized",
]
FEW += ["one ahead, direct", "several ahead, direct", "all in host memory, direct"]


def run_apart(rank: int, ways: Sequence[str]) -> dict[str, list[float]]:
    with use(Runtime()), mock.patch.object(shared_memory, "host_name", lambda: f"host {rank}"):
        return {way: trained(rank, way) for way in ways}


def run_late(rank: int, early: float, ways: Sequence[str]) -> tuple[dict[str, list[float]], set[str]]:
    """Results of training on the late device in these ways, and the wait sites of the first one."""
    found: dict[str, list[float]] = {}
    sites: set[str] = set()
    for way in ways:
        runtime = Deaf(early)
        with late_gathers(runtime):
            found[way] = trained(rank, way)
        sites = sites or runtime.sites
    return found, sites


def run_deaf(rank: int, way: str, site: str) -> list[float] | str:
    try:
        with late_gathers(Deaf(deaf_at=site)):
            return trained(rank, way)
    except Exception as error:  # noqa: BLE001 (whatever it is, the wait was missed)
        return f"{type(error).__name__}: {error}"


@pytest.fixture(scope="module", params=[FEW, pytest.param(list(WAYS), marks=pytest.mark.slow)], ids=len)
def ways(request: pytest.FixtureRequest) -> list[str]:
    found: list[str] = request.param
    return found


@pytest.fixture(scope="module")
def expected(ways: list[str]) -> list[dict[str, list[float]]]:
    return run_ranks(run_apart, 2, ways)


@pytest.fixture(scope="module")
def late(ways: list[str]) -> list[tuple[dict[str, list[float]], set[str]]]:
    return run_ranks(run_late, 2, 0.0, ways)


def test_the_same_bits(late: list[tuple[dict[str, list[float]], set[str]]], expected: list[dict[str, Any]]) -> None:
    assert [found for found, _ in late] == expected


def test_the_same_bits_where_some_gathers_come_early(ways: list[str], expected: list[dict[str, Any]]) -> None:
    early = ways if len(ways) == len(WAYS) else ["all in host memory"]
    wanted = [{way: numbers[way] for way in early} for numbers in expected]
    assert [found for found, _ in run_ranks(run_late, 2, 0.3, early)] == wanted


def test_every_wait_between_lanes_is_needed(late: list[tuple[dict[str, list[float]], set[str]]]) -> None:
    """Gathers wait for the update and for their buffer, compute waits for the gather."""
    files = ("comm/torch_backend.py", "comm/negotiation/own_rows.py", "comm/rows.py")
    sites = [site for site in late[0][1] if site.startswith(files)]
    # Memory is reused at once only by chance, and here ranks do the same, so that no row is read late for another one.
    waits = [site for site in sites if not any(word in line_of(site) for word in ("keep_until", "wait(self._sent)"))]
    assert len(waits) == 3, waits
    for site in waits:
        for found in run_ranks(run_deaf, 2, "one ahead", site):
            assert isinstance(found, str) or any(map(math.isnan, found)), f"nobody minds that {site} does not wait"


RECORD = Late.record


def forget_reads(self: Late, *read: Tensor) -> Event:
    event = RECORD(self, *read)
    return DONE if read else event


def run_hasty(rank: int) -> list[float] | str:
    """A direct gather does not wait for what compute may still read."""
    with mock.patch.object(Late, "record", forget_reads):
        return run_deaf(rank, "several ahead, direct", "")


def test_a_direct_gather_waits_for_what_compute_may_still_read() -> None:
    """The allocator gives a unit memory that queued work of other units, or of activations, may still read."""
    for found in run_ranks(run_hasty, 2):
        assert isinstance(found, str) and "a copy into what the compute stream may still read" in found, found
