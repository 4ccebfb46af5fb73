"""Code that starts processes is found by names, through helpers, classes, closures and parameters."""

from __future__ import annotations

import functools
import subprocess as sp
from collections.abc import Callable
from subprocess import run as start

import pytest

from tests.support import launch, ranks
from tests.support.ranks import free_port, run_ranks
from tests.support.starting import starts_processes


def by_helper() -> None:
    run_ranks(by_helper, 1)


def by_module() -> None:
    ranks.run_ranks(by_helper, 1)


def by_another_name() -> None:
    sp.run(["true"])


def by_the_function_alone() -> None:
    start(["true"])


def inside() -> None:
    def function() -> None:
        launch.launch(ranks.Path(), [])

    function()


class Starter:
    @staticmethod
    def method() -> None:
        run_ranks(by_helper, 1)


def by_class() -> None:
    Starter.method()


@functools.cache
def wrapped() -> None:
    by_class()


def closed_over(function: Callable[[], None]) -> Callable[[], None]:
    return lambda: function()


def neither() -> int:
    return free_port() + len(ranks.PRELOAD)


@pytest.mark.parametrize(
    "function", [by_helper, by_module, by_another_name, by_the_function_alone, inside, by_class, wrapped, Starter]
)
def test_what_starts_processes(function: object) -> None:
    assert starts_processes(function) and starts_processes(functools.partial(function))


def test_what_a_function_closes_over() -> None:
    assert starts_processes(closed_over(by_class)) and not starts_processes(closed_over(neither))


def test_what_starts_none() -> None:
    assert not starts_processes(neither) and not starts_processes(None)
