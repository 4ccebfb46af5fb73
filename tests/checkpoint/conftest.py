"""Tests of this folder destroy their process groups, because other tests need a process without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_zero.comm import destroy_process_group


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    yield
    destroy_process_group()
