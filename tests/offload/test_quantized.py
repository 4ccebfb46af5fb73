"""Vectors stored as messages: a read is rounded once, a write only changes the written blocks."""

from __future__ import annotations

import pytest
import torch

from hf_zero.comm.quantized import RoundedRows
from hf_zero.kernels.message import message_bytes
from hf_zero.offload.quantized import QuantizedVector
from hf_zero.offload.vector import InMemoryVector, part_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_and_writing_parts(dtype: torch.dtype) -> None:
    values = torch.randn(700, generator=torch.Generator().manual_seed(1)).to(dtype)
    vector = QuantizedVector(InMemoryVector(RoundedRows().sent(values)), 700, dtype)
    assert vector.tensor is None and vector.stored.numel == message_bytes(700, 8)
    before = vector.view()
    torch.testing.assert_close(before, values, rtol=0, atol=0.02)
    first, second = part_of(vector, 0, 300), part_of(vector, 300, 400)
    with first.opened() as a, second.opened(changes=True) as b:
        assert torch.equal(a, before[:300]) and torch.equal(b, before[300:])
        b[20:30] = 5.0
    after = vector.view()
    assert bool((after[320:330] - 5.0).abs().max() < 0.02)
    is_same = after == before
    assert bool(is_same[: 2 * 128].all()) and bool(is_same[3 * 128 :].all())
    with vector.opened(changes=True):
        pass  # unchanged values are not rounded again
    assert torch.equal(vector.view(), after)
