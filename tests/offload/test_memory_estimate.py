"""The memory of an offloaded training is estimated in advance, logged, and an error if it cannot fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_zero.config import resolve
from hf_zero.layout import ParameterSpec
from hf_zero.layout.sharding import Sharding
from hf_zero.offload import memory_estimate as needs_module
from hf_zero.offload.memory_estimate import DoesNotFit, MemoryEstimate, StateSizes, estimate_memory
from hf_zero.precision import Precision
from tests.offload.offload_runs import Run, engine_for
from tests.offload.test_offload import CPU, on_drive
from tests.support.ranks import run_ranks

CUDA, HOST = torch.device("cuda"), torch.device("cpu")
M = 10**6
WIDE_MASTERS = Precision(None, None, None)


def needs(
    device: torch.device,
    stage: int,
    world: int,
    precision: Precision = WIDE_MASTERS,
    *,
    dtype: str = "bfloat16",
    accumulates: bool = False,
    update: str = "cpu",
    **zero: object,
) -> MemoryEstimate:
    """Of Adam on a billion parameters. `update`: hf_zero.offload_update."""
    config = {
        "train_batch_size": world,
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_optimization": {"stage": stage, **zero},
        "hf_zero": {"offload_update": update},
    }
    policy = resolve(config, world_size=world).zero
    sizes = StateSizes(num_states=2, longest=100 * M, precision=precision, accumulates=accumulates)
    specs = [ParameterSpec("w", 10**9, 0, dtype)]
    return estimate_memory(specs, policy, Sharding(stage, 0, world), device, sizes)


PORTION, WHOLE = 2 * 100 * M // 4, 2 * 100 * M  # bytes of a bucket's weights or gradients: owned, and all
SENT = 2 * WHOLE  # reductions in flight
LEAVING, ARRIVING = 2 * PORTION, 5 * PORTION  # copies to the host: results on the device, and buffers there


@pytest.mark.at_once
def test_adam_on_a_billion_parameters_in_bf16() -> None:
    cpu, nvme = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 3}
    # 12 bytes of master and states, 2 of gradient
    assert needs(CUDA, 2, 4) == MemoryEstimate(device=3500 * M + SENT)
    on_host = needs(CUDA, 2, 4, offload_optimizer=cpu)
    assert on_host == MemoryEstimate(device=SENT + LEAVING, host=3500 * M + ARRIVING)
    assert needs(CUDA, 0, 4, offload_optimizer=cpu) == MemoryEstimate(
        device=4 * LEAVING, host=14_000 * M + 4 * ARRIVING
    )
    half = {**cpu, "ratio": 0.5}
    assert needs(CUDA, 2, 4, offload_optimizer=half) == MemoryEstimate(
        device=1750 * M + SENT + LEAVING, host=1750 * M + ARRIVING
    )
    assert needs(HOST, 2, 4, offload_optimizer=half) == MemoryEstimate(host=3500 * M + SENT + PORTION)
    vectors = 4 * 10 * M * 3
    small = {"sub_group_size": 10 * M}
    from_drive = needs(CUDA, 3, 4, offload_optimizer=nvme, **small)
    assert from_drive == MemoryEstimate(device=SENT + LEAVING, host=3 * vectors + 3 * PORTION + ARRIVING, disk=3500 * M)
    without = {**nvme, "pipeline_read": False, "pipeline_write": False}
    assert needs(CUDA, 3, 4, offload_optimizer=without, **small).host == vectors + 3 * PORTION + ARRIVING
    rest = {"device": "nvme", "nvme_path": "/nvme", "max_in_cpu": 0}
    both = needs(CUDA, 3, 4, offload_optimizer=nvme, offload_param=rest, **small)
    assert both == MemoryEstimate(
        device=from_drive.device + 3 * PORTION, host=from_drive.host + 5 * PORTION, disk=4000 * M
    )
    for little, numel in [
        ({"buffer_size": 18 * M}, 90 * M),
        ({"buffer_count": 4}, 100 * M),
        ({"buffer_count": 1}, 75 * M),
    ]:
        few = needs(CUDA, 3, 4, offload_optimizer=nvme, offload_param={**rest, **little}, **small)
        assert few.host == both.host - 5 * PORTION + 2 * numel
    some = {**rest, "max_in_cpu": 50 * M}
    assert needs(CUDA, 3, 4, offload_param=some).disk == 400 * M


def test_16_bit_masters() -> None:
    """The weights are the masters, unless the update runs on another device."""
    lp_param = Precision(None, None, None, low_precision_masters=True)
    assert needs(CUDA, 2, 4, lp_param).device == 2500 * M + SENT
    assert needs(CUDA, 2, 4, replace(lp_param, low_precision_states=True)).device == 1500 * M + SENT
    cpu = {"device": "cpu"}
    assert needs(CUDA, 2, 4, lp_param, offload_optimizer=cpu).host == 3000 * M + ARRIVING
    both = needs(CUDA, 3, 4, lp_param, offload_optimizer=cpu, offload_param=cpu)
    assert both.host == 2500 * M + 500 * M + ARRIVING, "the rows on the host are the masters"


def test_weights_in_fp32_have_masters_where_the_update_runs() -> None:
    """A model in fp32 with its optimizer on the host: the check expected 12 bytes per parameter, and masters of 4 more
    were allocated, because the update does not reach the weights on the device."""
    found = needs(CUDA, 2, 4, dtype="float32", offload_optimizer={"device": "cpu"})
    assert found.host == 4000 * M + 2 * ARRIVING


def test_streamed_states_have_masters_where_the_device_updates() -> None:
    """In fp32 the weights on the device are the masters of an update there; those in host memory are not."""
    cpu = {"device": "cpu"}

    def found(update: str, stage: int, **zero: object) -> MemoryEstimate:
        return needs(CUDA, stage, 4, dtype="float32", update=update, offload_optimizer=cpu, **zero)

    assert found("cpu", 2).host - found("device", 2).host == 1000 * M
    assert found("both", 2).host == found("cpu", 2).host, "it may be all on the CPU"
    assert found("device", 3, offload_param=cpu).host - found("cpu", 3, offload_param=cpu).host == 1000 * M
    chunk = min(25 * M, 1 << 23)
    assert found("device", 2).device - found("cpu", 2).device == 3 * chunk * (8 + 4), "three chunks"


def test_accumulation_below_stage_2_takes_whole_gradients_on_the_device() -> None:
    """They were missing, and sums in another dtype than the weights' were counted in that of the weights."""
    wide = Precision(None, None, torch.float32)
    found = needs(CUDA, 1, 4, wide, accumulates=True, offload_optimizer={"device": "cpu"})
    assert found == MemoryEstimate(device=4000 * M + SENT + LEAVING, host=4000 * M + ARRIVING)


def refused(rank: int, run: Run) -> str:
    needs_module.host_available = lambda: 2_000  # type: ignore[assignment]
    with pytest.raises(DoesNotFit) as caught:
        engine_for(run, 2)
    return str(caught.value)


def test_what_cannot_fit_is_refused_on_every_rank_with_both_numbers() -> None:
    for message in run_ranks(refused, 2, Run(2, zero=CPU)):
        assert "2 rank(s) need 10.60 kB of host memory" in message and "2.00 kB are available" in message
        assert "use more ranks, device nvme" in message


def test_one_line_says_what_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "hf_zero"):
        engine_for(Run(2, zero=on_drive(tmp_path, parameters=False)), 1).destroy()
    [line] = [line for text in caplog.messages for line in text.splitlines() if "this rank needs" in line]
    assert "kB of host memory (" in line and "kB of disk (" in line and "activations" in line
