"""The schedule of a step with offload on a simulated device with an H100's speeds: what runs beside what.

The real engine runs on `tests.support.timed_network`. Every layer of the small model stands for one of a large model:
its declared times are those of the large layer, and links are slower by the ratio of their sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_zero.device.runtime import Lane
from hf_zero.layout.memory import STREAMED_NUMEL
from hf_zero.offload import update_speed
from hf_zero.offload.update_speed import UpdateSpeed
from hf_zero.planning.event_model import UPDATE_BYTES, Machine, Setup, Shape, simulate
from tests.support.models import at_backward
from tests.support.timed_network import Link, TimedDevice, timed_world

WIDTH = 32
NUMEL = WIDTH * WIDTH  # of a layer
CPU = {"device": "cpu"}
# Host memory of a whole host with 8 channels of DDR5, and what an update on the 16 cores of a shared one reached.
H100 = Machine("H100", 1, 590e12, 3.0e12, 1e15, 55e9, 300e9, 80e9)
FEW_CORES = replace(H100, host_memory=81e9)
SMALL, LARGE = Shape("1.5B", 1.5e9, 28), Shape("8B", 8e9, 32)


@dataclass(frozen=True)
class Times:
    """Seconds of one layer of the large model, and of updating one element of the small one."""

    forward: float
    queue: float  # in which the host queues its kernels
    update_on_host: float
    update_on_device: float


class Layer(nn.Module):
    def __init__(self, number: int, device: TimedDevice, times: Times) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.number, self.device, self.times = number, device, times

    def forward(self, values: Tensor) -> Tensor:
        self.compute("forward", self.times.forward)
        # Recomputation included.
        return at_backward(self.linear(values).tanh(), lambda: self.compute("backward", 3 * self.times.forward))

    def compute(self, what: str, seconds: float) -> None:
        self.device.on_host(f"kernels of {what} {self.number}", self.times.queue)
        self.device.compute(f"{what} {self.number}", seconds)


class Model(nn.Sequential):
    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values).square().mean()  # type: ignore[no-any-return]


def timing(update: Callable[..., None], device: TimedDevice, times: Times) -> Callable[..., None]:
    """An updater's `update_sub_group` that takes time: the host's, or that of the current lane."""

    def timed(sub_group: Any, **options: Any) -> None:
        numel, name = sub_group.part.numel, f"update {sub_group.bucket}"
        if sub_group.stored.master.memory.is_host and not sub_group.stored.master.leaves_late:
            device.on_host(name, times.update_on_host * numel)
        else:
            device.compute(name, times.update_on_device * numel)
        update(sub_group, **options)

    return timed


def step_over_compute(machine: Machine, shape: Shape, tokens: int, zero: dict[str, Any], by: str = "cpu") -> float:
    """Seconds of a step in steady state over those of forward and backward alone; `by`: `hf_zero.offload_update`."""
    ratio = shape.parameters / shape.units / NUMEL  # elements of the large model that one of the small stands for
    forward = 2 * shape.parameters / shape.units * tokens / machine.flops
    on_host, on_device = (UPDATE_BYTES * ratio / rate for rate in (machine.host_memory, machine.memory))
    times = Times(forward, machine.queue, on_host, on_device)
    limits = {"stage3_prefetch_bucket_size": 5e7, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "hf_zero": {"offload_update": by},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            **({} if by == "cpu" else {"sub_group_size": int(STREAMED_NUMEL / ratio)}),
            **{key: int(numel / ratio) for key, numel in limits.items()},
            **zero,
        },
    }
    link = Link(1e30, host_bytes_per_s=machine.host_link / ratio)
    with timed_world(link, ranks=1) as world:
        device = world.device
        model = Model(*(Layer(number, device, times) for number in range(shape.units)))
        engine, *_ = world.initialize(model=model, config=config)
        updater = engine.optimizer.updater
        updater.update_sub_group = timing(updater.update_sub_group, device, times)
        for _ in range(4):
            engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)))
            engine.step()
    ends = [piece.end for piece in device.pieces if piece.lane == Lane.COMPUTE.value and piece.what == "backward 0"]
    return (ends[-1] - ends[0]) / (len(ends) - 1) / (4 * forward * shape.units)


def with_states(ratio: float) -> dict[str, Any]:
    """Weights on the host, and this part of the states; 0: none."""
    states = {"offload_optimizer": {**CPU, "ratio": ratio}} if ratio else {}
    return {"offload_param": CPU, **states}


@pytest.mark.parametrize(
    ("shape", "ratio", "tokens", "most"),
    [
        (SMALL, 0.0, 16_384, 1.1),  # the states of 1.5B fit on the device, so "ratio": "auto" keeps them there
        (LARGE, 0.45, 16_384, 1.1),  # those of 8B fit by half
        (LARGE, 1.0, 16_384, 1.25),
        (LARGE, 1.0, 65_536, 1.08),
    ],
    ids=["1.5B", "8B, states by half", "8B", "8B, four times the tokens"],
)
def test_a_step_with_offload_is_hardly_longer_than_its_compute(
    shape: Shape, ratio: float, tokens: int, most: float
) -> None:
    """It was twice as long when updates followed backward, and 1.2 times when weights left before forward began."""
    assert step_over_compute(H100, shape, tokens, with_states(ratio)) <= most


@pytest.fixture
def speeds_of_few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    speed = UpdateSpeed(cpu=FEW_CORES.host_memory / UPDATE_BYTES, device=FEW_CORES.host_link / 16)
    monkeypatch.setattr(update_speed, "measure", lambda *args, **options: speed)


@pytest.mark.usefixtures("speeds_of_few_cores")
def test_updates_by_both_gain_where_the_host_is_slow() -> None:
    """Their kernels were queued before the next forward, which waited for all states that stream through the device."""
    by_cpu, by_both = (step_over_compute(FEW_CORES, LARGE, 16_384, with_states(1.0), by) for by in ("cpu", "both"))
    assert by_both <= 0.7 * by_cpu
    assert step_over_compute(FEW_CORES, LARGE, 65_536, with_states(1.0), "both") <= 1.05


@pytest.mark.parametrize("machine", [H100, FEW_CORES], ids=["host memory of a whole host", "of 16 cores"])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_plan_predicts_the_schedule(machine: Machine, ratio: float) -> None:
    setup = Setup(3, offload_optimizer=bool(ratio), offload_parameters=True, offload_ratio=ratio or 1.0)
    assert step_over_compute(machine, LARGE, setup.tokens, with_states(ratio)) == pytest.approx(
        predicted(machine, setup), rel=0.05
    )


@pytest.mark.usefixtures("speeds_of_few_cores")
@pytest.mark.parametrize("tokens", [16_384, 65_536])
@pytest.mark.parametrize("by", ["device", "both"])
def test_plan_predicts_the_schedule_of_states_that_stream_through_the_device(by: Any, tokens: int) -> None:
    setup = Setup(3, offload_optimizer=True, offload_parameters=True, update=by, tokens=tokens)
    assert step_over_compute(FEW_CORES, LARGE, tokens, with_states(1.0), by) == pytest.approx(
        predicted(FEW_CORES, setup), rel=0.08
    )


def predicted(machine: Machine, setup: Setup) -> float:
    step = simulate(machine, LARGE, setup)
    return step.seconds / step.busy["compute"]
