"""The schedule of a step on a simulated device and network with given speeds: what overlaps with what.

The real engine runs on `tests.support.timed_network`, where every lane has a clock; gathers and reductions share the
link. Blocks declare their compute time; bytes and the link's speed determine the communication time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.device.runtime import Lane
from tests.support.models import at_backward
from tests.support.timed_network import REDUCE, Link, Piece, TimedDevice, timed_world

WIDTH, BLOCKS, RANKS = 64, 24, 8
NUMEL = WIDTH * (WIDTH + 1)  # of a block
COMPUTE = 1.0  # seconds of a step, a third of it forward
NOTHING_KEPT = {
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
}
SEVERAL = {**NOTHING_KEPT, "stage3_max_live_parameters": 6 * NUMEL, "stage3_prefetch_bucket_size": 3 * NUMEL}


class Block(nn.Module):
    def __init__(self, number: int, device: TimedDevice) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.number, self.device = number, device

    def forward(self, values: Tensor) -> Tensor:
        self.device.compute(f"forward {self.number}", COMPUTE / 3 / BLOCKS)
        of_backward = f"backward {self.number}", 2 * COMPUTE / 3 / BLOCKS
        return at_backward(self.linear(values).tanh(), lambda: self.device.compute(*of_backward))


class Model(nn.Module):
    def __init__(self, device: TimedDevice) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, device) for number in range(BLOCKS))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return values.square().mean()


@dataclass(frozen=True)
class Found:
    """One update in steady state, in seconds."""

    step: float
    traffic: float
    pieces: list[Piece]

    @property
    def hidden(self) -> float:
        return (COMPUTE + self.traffic - self.step) / min(COMPUTE, self.traffic)

    @property
    def over_floor(self) -> float:
        return self.step / max(COMPUTE, self.traffic)


def run(
    zero: dict[str, Any], ratio: float, latency_s: float = 0.0, *, num_passes: int = 3, shard_group: int | None = None
) -> Found:
    """`ratio`: seconds of a step's communication per second of compute, if `num_passes` gathers and reductions of all
    weights are needed."""
    a_pass = 2 * BLOCKS * NUMEL * (RANKS - 1) / RANKS  # bytes that a rank receives
    config = {
        "hf_zero": {"shard_group": shard_group},
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, **zero},
    }
    with timed_world(Link(num_passes * a_pass / ratio, latency_s), RANKS) as world:
        device = world.device
        engine, *_ = world.initialize(model=Model(device), config=config)
        ends = []
        for _ in range(6):
            engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)))
            engine.step()
            ends.append(device.now)
    pieces = [piece for piece in device.pieces if ends[-2] < piece.end <= ends[-1]]
    traffic = sum(piece.end - piece.start for piece in pieces if piece.lane != Lane.COMPUTE.value)
    return Found((ends[-1] - ends[1]) / 4, traffic, pieces)


@pytest.mark.parametrize("zero", [NOTHING_KEPT, SEVERAL], ids=["one ahead", "several ahead"])
@pytest.mark.parametrize(("ratio", "latency_s"), [(1.0, 0.0), (1.0, 0.002), (3.0, 0.0), (1 / 3, 0.0), (1 / 3, 0.002)])
def test_the_shorter_one_hides_behind_the_longer(zero: dict[str, Any], ratio: float, latency_s: float) -> None:
    """Compute takes as long as communication, a third of it, or three times as long; latency is a 500th of a step."""
    found = run(zero, ratio, latency_s)
    assert found.traffic == pytest.approx(ratio, rel=0.05)
    assert found.hidden >= 0.9
    assert found.over_floor <= 1.1


def test_compute_hardly_idles_where_it_is_the_bound() -> None:
    kept = {"stage3_param_persistence_threshold": 0}  # until backward
    for zero in (NOTHING_KEPT, SEVERAL, kept):
        found = run(zero, 0.9, 0.002)
        busy = sum(piece.end - piece.start for piece in found.pieces if piece.lane == Lane.COMPUTE.value)
        assert busy == pytest.approx(COMPUTE)
        assert 1 - busy / found.step < 0.1


def test_a_reduction_begins_with_its_last_gradient_and_holds_up_no_gather() -> None:
    found = run(SEVERAL, 1 / 3)
    ends = {piece.what: piece.end for piece in found.pieces if piece.lane == Lane.COMPUTE.value}
    begun = [piece.start for piece in found.pieces if piece.lane == REDUCE]
    in_backward = [ends[f"backward {number}"] for number in reversed(range(BLOCKS))]
    each = 1 / 9 / BLOCKS  # of a reduction on the link: at most one gather is before it
    assert all(0 <= start - end <= each * 1.01 for start, end in zip(begun, in_backward, strict=True))
    begins = {piece.what: piece.start for piece in found.pieces if piece.lane == Lane.COMPUTE.value}
    for number in range(BLOCKS - 1):  # the next block's weights are available: no gap in between
        assert begins[f"backward {number}"] == pytest.approx(ends[f"backward {number + 1}"])


def test_what_crosses_the_link() -> None:
    counts = Counter(piece.lane for piece in run(NOTHING_KEPT, 1.0).pieces)
    assert counts[Lane.GATHER.value] == 2 * BLOCKS
    assert counts[REDUCE] == BLOCKS


@pytest.mark.parametrize("shard_group", [None, 4], ids=["all ranks", "copies of the shards"])
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_gather_beside_the_next_forward(stage: int, shard_group: int | None) -> None:
    """Updated weights were gathered before `step` returned: a sixth of a step in which communication takes a third as
    long as compute, and a third of one in which both take as long."""
    zero = {"stage": stage, "reduce_bucket_size": NUMEL}
    for ratio in (1 / 3, 3.0):
        assert run(zero, ratio, num_passes=2, shard_group=shard_group).over_floor <= 1.05
    # Neither can hide all of the other: gathers end before backward begins, and reductions begin with it.
    balanced = run(zero, 1.0, num_passes=2)
    assert balanced.step <= 1.05 * (max(COMPUTE / 3, balanced.traffic / 2) + max(2 * COMPUTE / 3, balanced.traffic / 2))


@pytest.mark.parametrize("ratio", [1 / 3, 1.0, 3.0])
def test_sums_over_copies_of_the_shards_hide_too(ratio: float) -> None:
    assert run({**SEVERAL, "mics_shard_size": 4}, ratio).over_floor <= 1.05


def test_without_overlap_the_gathers_are_part_of_the_step() -> None:
    zero = {"stage": 2, "reduce_bucket_size": NUMEL, "overlap_comm": False}
    assert run(zero, 1 / 3, num_passes=2).step >= COMPUTE + 1 / 6
