"""Warnings that are raised from hf_zero's own modules are errors, in tests and in their ranks."""

from __future__ import annotations

import warnings

import pytest

from hf_zero.config.sources import dotted
from tests.support.ranks import RankFailure, run_ranks


def _warn(module: str) -> None:
    """What a library does that has deprecated a function: the place is that of the caller."""
    warnings.warn_explicit("this function is deprecated", FutureWarning, f"{module}.py", 1, module=module)


def run_warning(rank: int, module: str) -> None:
    _warn(module)


@pytest.mark.parametrize("module", ["hf_zero", dotted.__module__])
def test_a_warning_from_our_code_is_an_error(module: str) -> None:
    """The first line of a run was "FutureWarning: `_set_pg_timeout` is deprecated", from our own code and on every
    rank: a newer torch than that of the tests was installed, and nothing had failed with it."""
    with pytest.raises(FutureWarning):
        _warn(module)
    with pytest.raises(RankFailure, match="FutureWarning: this function is deprecated"):
        run_ranks(run_warning, 1, module)


def test_a_warning_from_other_code_is_none() -> None:
    with pytest.warns(FutureWarning):
        _warn("hf_zero_like")
    run_ranks(run_warning, 1, "torch.nn")
