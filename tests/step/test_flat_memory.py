"""Hundreds of updates take no more memory than tens of updates."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.comm.cpu import shared_memory
from tests.support.memory import anonymous_bytes
from tests.support.ranks import run_ranks

WIDTH, MEASURED = 64, (100, 300)
FEW = 4 << 20  # even without growth, the heap of a process varies by this many bytes
ONE_BUFFER = 34_000  # bytes of one more gather in flight, when ranks happen to drift apart


def live_bytes() -> int:
    """Bytes of all tensors that Python tracks."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            storage = torch.Tensor.untyped_storage(each)
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def run_updates(rank: int, zero: dict[str, Any], folder: str, apart: bool) -> list[tuple[int, int]]:
    """(bytes of live tensors, anonymous memory) after each number of updates in MEASURED."""
    for device in ("offload_optimizer", "offload_param"):
        if zero.get(device, {}).get("device") == "nvme":
            zero[device]["nvme_path"] = folder
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4))
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": zero,
    }
    found = []
    host = f"host {rank}" if apart else "host"
    with mock.patch.object(shared_memory, "host_name", lambda: host):
        engine, *_ = hf_zero.initialize(model=model, config=config)
    for update in range(1, MEASURED[-1] + 1):
        for _ in range(2):
            loss = engine(torch.randn(2, WIDTH, dtype=torch.bfloat16)).square().mean()
            engine.backward(loss)
            engine.step()
        if update % 50 == 0:
            with torch.no_grad():
                engine(torch.randn(2, WIDTH, dtype=torch.bfloat16))
        if update in MEASURED:
            found.append((live_bytes(), anonymous_bytes()))
    return found


def on(device: str, *what: str) -> dict[str, Any]:
    return {f"offload_{each}": {"device": device} for each in what}


LIMITS = {"stage3_max_live_parameters": 0, "stage3_param_persistence_threshold": 0}
CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "stage 3, limits 0": {"stage": 3, **LIMITS},
    **{f"stage {stage}, states on the host": {"stage": stage, **on("cpu", "optimizer")} for stage in (1, 2, 3)},
    "stage 3, all on the host": {"stage": 3, **on("cpu", "optimizer", "param"), **LIMITS},
    "stage 3, all on a drive": {"stage": 3, **on("nvme", "optimizer", "param"), **LIMITS},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("apart", [False, True], ids=["one host", "two hosts"])
@pytest.mark.parametrize("case", CASES)
def test_memory_stays_as_it_is(case: str, apart: bool, tmp_path: Any) -> None:
    for (live_before, all_before), (live, everything) in run_ranks(
        run_updates, 2, CASES[case], str(tmp_path), apart, timeout_s=800
    ):
        assert live <= live_before + ONE_BUFFER
        assert everything <= all_before + FEW
