"""The simulated device of this folder's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.late import Late, use


@pytest.fixture
def late() -> Iterator[Late]:
    """All copies are as late as they may be."""
    with use(Late(early=0.0)) as runtime:
        yield runtime
