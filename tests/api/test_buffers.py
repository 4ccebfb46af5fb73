"""Buffers are local to each rank, as in DeepSpeed, or broadcast from rank 0, as in DistributedDataParallel.

A user moved a model with BatchNorm from DDP to hf_zero and got a different evaluation loss (0.7095 instead of 0.7087):
DDP broadcasts the running means of rank 0 before each forward.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_zero import initialize
from hf_zero.comm import ledger
from hf_zero.precision import Precision, cast_buffers
from tests.support.ranks import run_each, run_ranks

LR, STEPS, ACCUMULATION = 0.1, 4, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        loss: Tensor = self.layers(x).square().mean()
        return loss


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    return [torch.randn(4, 6, generator=generator) + rank for _ in range(STEPS * ACCUMULATION)]


def _same_as_ddp(rank: int, stage: int) -> None:
    model = Net()
    peer = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "hf_zero": {"broadcast_buffers": True},
    }
    engine = initialize(model=model, config=config)[0]
    sgd = torch.optim.SGD(peer.parameters(), lr=LR)
    for number, x in enumerate(batches(rank)):
        engine.train()
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        peer.train()
        at_boundary = (number + 1) % ACCUMULATION == 0
        if at_boundary:
            expected = peer(x)
            (expected / ACCUMULATION).backward()
            sgd.step()
            sgd.zero_grad()
        else:
            with peer.no_sync():
                expected = peer(x)
                (expected / ACCUMULATION).backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    # DDP would take rank 0's values before its next forward; here all ranks have them since the update.
    mine = torch.cat([buffer.float().reshape(-1) for buffer in model.buffers()])
    theirs = torch.cat([buffer.float().reshape(-1) for buffer in peer.module.buffers()])
    first = theirs.clone()
    dist.broadcast(first, 0)
    torch.testing.assert_close(mine, first, rtol=1e-5, atol=1e-6)
    assert mine[0] != 0.0 and (rank == 0 or not torch.allclose(mine, theirs, atol=1e-3)), "ranks saw other data"


@pytest.mark.parametrize("stage", [1, 3])
def test_with_broadcast_buffers_they_are_those_of_ddp(stage: int) -> None:
    run_ranks(_same_as_ddp, 2, stage)


def _own(rank: int, own: dict[str, bool], calls: int) -> list[float]:
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "hf_zero": own,
    }
    engine = initialize(model=model, config=config)[0]
    for x in batches(rank)[:2]:
        ledger.reset()
        engine.backward(engine(x))
        engine.step()
    broadcasts = sum(tally.calls for (_, operation), tally in ledger.tallies.items() if operation == "broadcast")
    assert broadcasts == calls
    return model.layers[1].running_mean.tolist()


@pytest.mark.parametrize(("own", "calls"), [({}, 0), ({"broadcast_buffers": True}, 3)], ids=["default", "broadcast"])
def test_it_costs_a_message_per_dtype_and_nothing_by_default(own: dict[str, bool], calls: int) -> None:
    first, second = run_ranks(_own, 2, own, calls)
    assert (first == second) == bool(own)


class Scaled(nn.Module):
    """A model with a buffer in its arithmetic, a BatchNorm that is used twice, and one in fp32 by its own list."""

    _keep_in_fp32_modules_strict = ("correction",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.again = nn.Sequential(self.norm)
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.register_buffer("correction", torch.full((1,), 1.001))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(self.again(self.first(x * self.scale))).square().mean() * self.correction
        return loss.mean()


def _run_in_16_bits(rank: int, stage: int, dtype: str, data_types: dict[str, Any]) -> dict[str, torch.dtype]:
    """Train two updates; the statistics are those of plain PyTorch. Returns the dtypes of the buffers."""
    model, peer = Scaled(), Scaled()
    weights = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[dtype])
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        dtype: {"enabled": True},
        "data_types": data_types,
    }
    engine = initialize(model=model, config=config)[0]
    peer.to(weights)
    is_cast = bool(data_types)
    x = batches(rank)[0].to(weights)
    given = x if is_cast else x / 2  # times the scale, in fp32: an error that says what to do
    if not is_cast:
        with pytest.raises(RuntimeError, match=f"buffer in fp32 .*scale.*data_types.buffer_dtype to .{dtype}"):
            engine(given)
        model.scale = model.scale.to(weights)
        engine.module.scale = model.scale
    for _ in range(2):
        engine.backward(engine(given))
        engine.step()
        peer(given)
    torch.testing.assert_close(model.norm.running_var.float(), peer.norm.running_var.float())
    assert not torch.equal(model.norm.running_var.float(), torch.ones(6)), "the statistics are followed"
    assert engine.module.norm.running_mean is engine.module.again[0].running_mean
    engine.eval()
    engine(given)
    dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
    engine.destroy()
    return dtypes


def test_batch_norm_in_16_bits_on_cpus() -> None:
    """A user trained a convolutional model in bf16 on CPUs and got "expected scalar type BFloat16 but found Float".

    Buffers keep their dtype, but torch's BatchNorm on CPUs requires the statistics in the dtype of its weights. They
    follow the weights there now. The way out for other buffers in DeepSpeed, `data_types.buffer_dtype`, was refused.
    """
    cases = [
        (2, "bf16", {}),
        (3, "bf16", {"buffer_dtype": "bf16"}),
        (0, "fp16", {"buffer_dtype": "fp16", "keep_in_fp32_modules": ["correction"]}),
    ]
    for (_, dtype, data_types), (dtypes, _) in zip(cases, run_each(_run_in_16_bits, 2, cases), strict=True):
        weights = torch.bfloat16 if dtype == "bf16" else torch.float16
        assert dtypes["norm.running_mean"] == dtypes["norm.running_var"] == dtypes["scale"] == weights
        assert dtypes["correction"] == torch.float32, data_types
        assert dtypes["norm.num_batches_tracked"] == dtypes["calls"] == torch.int64


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("precision", "device", "expected"),
    [
        (Precision(BF16, None, None), "cpu", (BF16, FP32, FP32)),
        (Precision(BF16, None, None), "cuda", (FP32, FP32, FP32)),
        (Precision(None, None, None), "cpu", (FP32, FP32, FP32)),
        (Precision(BF16, None, None, buffers=FP32), "cpu", (FP32, FP32, FP32)),
        (Precision(BF16, None, None, buffers=BF16), "cuda", (BF16, BF16, FP32)),
        (Precision(BF16, None, None, buffers=BF16, kept_buffers=()), "cpu", (BF16, BF16, BF16)),
        (Precision(BF16, None, None, buffers=BF16, kept_buffers=("sca*e", "norm")), "cpu", (FP32, FP32, BF16)),
        (Precision(FP16, None, None, buffers=FP16), "cpu", (FP16, FP16, FP32)),
    ],
)
def test_which_buffers_are_cast(precision: Precision, device: str, expected: tuple[torch.dtype, ...]) -> None:
    model = nn.Sequential(Scaled())  # a list of names belongs to the module that has it
    cast_buffers(model, precision, torch.device(device))
    inner: Any = model[0]
    assert (inner.norm.running_var.dtype, inner.scale.dtype, inner.correction.dtype) == expected
