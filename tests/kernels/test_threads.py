"""The result of an elementwise update does not depend on the number of threads, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_zero.device.cores import torch_threads
from hf_zero.kernels.vectors import CPU_CHUNK_NUMEL, on_threads
from tests.kernels.cases import NARROW, UPDATES, Types, vectors_for

BF16 = torch.bfloat16
NUMEL = 3 * CPU_CHUNK_NUMEL + 12_345  # every number of threads cuts chunks and their parts at other elements


def updated(name: str, types: Types, threads: int, seed: int | None) -> list[Tensor]:
    vectors = vectors_for(UPDATES[name], NUMEL, types, "cpu")
    options = {} if seed is None else {"seed": seed}
    with torch_threads(threads):
        for step in (1, 2):
            UPDATES[name].run(vectors, step, scale=0.37, **options)
    return [vectors.weight, *vectors.states, *([] if vectors.lp_param is None else [vectors.lp_param])]


CASES = [
    *((name, Types(BF16, BF16), None) for name in NARROW),
    *((name, Types(torch.float32, None), None) for name in NARROW),
    ("adamw", Types(BF16, None, weight=BF16), 7),  # stochastic rounding
]


@pytest.mark.parametrize(("name", "types", "seed"), CASES, ids=[f"{name}-{types.gradient}" for name, types, _ in CASES])
def test_threads_and_one(name: str, types: Types, seed: int | None) -> None:
    """Vectorised loops round their last elements differently, and every thread has its own last elements."""
    expected = updated(name, types, 1, seed)
    for threads in (2, 3, 7):
        for found, wanted in zip(updated(name, types, threads, seed), expected, strict=True):
            assert torch.equal(found, wanted), f"{(found != wanted).sum()} elements differ with {threads} threads"


def test_parts_on_threads_run_their_operations_alone() -> None:
    """PyTorch sets a thread's own number of threads when it first asks for it. Workers that had set theirs before ran
    operations on several threads each, more than there are cores, and all later operations of the process were slow."""
    seen: list[int] = []

    def work(_part: int) -> None:
        torch.ones(1 << 20).add_(1)
        seen.append(torch.get_num_threads())

    with torch_threads(3):
        on_threads(work, range(6), torch.device("cpu"))
        assert torch.get_num_threads() == 3
    assert seen == [1] * 6
