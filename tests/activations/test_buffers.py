"""Memory of kept inputs: as many blocks as were in use at once, and slots of one buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_zero.activations.kept import HostPool, OneBuffer


def test_a_pool_has_as_many_blocks_as_were_in_use_at_once() -> None:
    """With batches of all lengths, a pool with a block for each length would grow forever."""
    pool = HostPool()
    first, second = pool.take(4000), pool.take(1000)
    pool.give(first)
    pool.give(second)
    assert pool.take(900) is second and pool.take(900) is first
    pool.give(first)
    pool.give(second)
    larger = pool.take(9000)
    assert len(larger) >= 9000 and pool.take(2000) is first
    pool.give(larger)
    assert pool.take(100) is larger  # no smaller block is left


def test_slots_lie_side_by_side() -> None:
    made: list[Tensor] = []

    def make(num_bytes: int) -> Tensor:
        made.append(torch.empty(num_bytes, dtype=torch.uint8))
        return made[-1]

    buffer = OneBuffer(make, 3)
    slots = [buffer.take(700) for _ in range(3)]
    addresses = [slot.data_ptr() for slot in slots]
    assert addresses == [addresses[0] + 1024 * number for number in range(3)]
    apart, larger = buffer.take(700), buffer.take(5000)  # no slot is free, or none is large enough
    assert [len(block) for block in made] == [3072, 700, 5000]
    for block in (apart, larger, *slots):
        buffer.give(block)
    assert {buffer.take(10).data_ptr() for _ in range(3)} == set(addresses)
    for slot in slots:
        buffer.give(slot)
    assert len(buffer.take(2000)) == 2048 and len(made[-1]) == 3 * 2048  # all were free: slots are larger from now on
