"""What a plain step loads is bounded: a feature that nobody asked for is not imported."""

from __future__ import annotations

import pytest

from tests.support.loaded import loaded

# Only ever lowered. `python -m tests.support.loaded` shows what there is.
MAX_MODULES = 174
MAX_LINES = 21_600


@pytest.fixture(scope="module")
def modules() -> dict[str, int]:
    return loaded()


def test_a_plain_step_loads_no_more_than_it_needs(modules: dict[str, int]) -> None:
    assert len(modules) <= MAX_MODULES, "what is new is imported by everybody: python -m tests.support.loaded"
    assert sum(modules.values()) <= MAX_LINES
