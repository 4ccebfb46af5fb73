"""Weights stored in one place and updated in another: copies in buffers, which are written back only if changed.

Without a GPU both places are host memory; the tests check which values are where at which time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.config import Aio
from hf_zero.device.runtime import Runtime
from hf_zero.offload.placement import StagedVector, StagingPool
from hf_zero.offload.swap_store import BufferPool, Drive
from hf_zero.offload.vector import InMemoryVector, Vector, part_of


def pool() -> StagingPool:
    return StagingPool(Runtime(), lambda numel, dtype: torch.full((numel,), float("nan"), dtype=dtype), is_host=True)


@pytest.fixture(params=["memory", "drive"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    values = torch.arange(5000.0)
    if request.param == "memory":
        yield InMemoryVector(values)
        return
    drive = Drive(tmp_path, Aio())
    yield drive.store(drive.file("weights"), BufferPool(limit=3)).adopt("weights", values)
    drive.close()


def test_a_copy_is_worked_on_and_goes_back(home: Vector) -> None:
    staged = StagedVector(home, pool())
    assert staged.tensor is None and staged.is_whole and staged.failure is None
    staged.fetch()
    values = staged.take()
    assert torch.equal(values, torch.arange(5000.0))
    values.mul_(2)
    assert torch.equal(home.view(), torch.arange(5000.0)), "not before it is released"
    staged.release(changed=True)
    staged.flush()
    assert torch.equal(home.view(), torch.arange(5000.0) * 2) and torch.equal(staged.view(), home.view())


def test_what_was_not_changed_does_not_go_back(home: Vector) -> None:
    staged = StagedVector(home, pool())
    with staged.opened() as values:
        values.zero_()
    assert torch.equal(home.view(), torch.arange(5000.0))


def test_values_that_do_not_matter_are_not_copied(home: Vector) -> None:
    staged = StagedVector(home, pool())
    staged.fetch(reads=False)
    assert staged.take().isnan().all()
    staged.take().fill_(7)
    staged.release(changed=True)
    assert float(home.view().sum()) == 35_000


def test_parts_of_one_home(home: Vector) -> None:
    """The update's sub-groups: each has its own buffer; their changes are merged at home."""
    buffers = pool()
    first, second = (StagedVector(part_of(home, start, 2500), buffers) for start in (0, 2500))
    first.fetch()
    second.fetch()
    for staged, factor in ((first, 2), (second, 3)):
        staged.take().mul_(factor)
        staged.release(changed=True)
    second.flush()
    expected = torch.cat([torch.arange(2500.0) * 2, torch.arange(2500.0, 5000.0) * 3])
    assert torch.equal(home.view(), expected)


def test_buffers_rotate() -> None:
    buffers = pool()
    vectors = [StagedVector(InMemoryVector(torch.ones(100)), buffers) for _ in range(10)]
    seen = set()
    vectors[0].fetch()
    for index, vector in enumerate(vectors):
        if index + 1 < len(vectors):
            vectors[index + 1].fetch()
        seen.add(vector.take().data_ptr())
        vector.release(changed=True)
    assert len(seen) == 2
