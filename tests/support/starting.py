"""Finds tests that start processes, by the names in their code, and checks them while they run.

A test starts processes if its code, one of its fixtures, or code of `tests` that one of these references names
`subprocess`, `multiprocessing` or `fork`. tests/conftest.py then marks it `processes`, and `make test-quick` skips it.
If the program under test starts processes, the test needs an explicit `@pytest.mark.processes`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest

STARTERS = frozenset(("subprocess", "multiprocessing", "fork"))
_EVENTS = frozenset(("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"))


def item_starts_processes(item: pytest.Item) -> bool:
    """Whether a test, one of its fixtures, or a function among its parameters starts processes."""
    if not isinstance(item, pytest.Function):
        return False
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    subjects = [item.function, *(definition.func for definitions in fixtures for definition in definitions)]
    return any(map(starts_processes, [*subjects, *filter(inspect.isfunction, parameters)]))


@functools.cache
def starts_processes(subject: Any) -> bool:
    """Whether a function, or any method of a class, leads to one of `STARTERS` through code of `tests`."""
    seen: set[Any] = set()
    left = [*_parts(subject)]
    while left:
        function = left.pop()
        if function not in seen:
            seen.add(function)
            names, functions = _named_by(function)
            if names & STARTERS:
                return True
            left += functions
    return False


@functools.cache
def _named_by(function: FunctionType) -> tuple[frozenset[str], tuple[FunctionType, ...]]:
    """Names in a function's code, and the functions of `tests` that they refer to."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    values = [function.__globals__[name] for name in names if name in function.__globals__]
    values += inspect.getclosurevars(function).nonlocals.values()
    for module in [value for value in values if isinstance(value, ModuleType)]:
        names.add(module.__name__.partition(".")[0])  # `import subprocess as sp`
        if module.__name__.startswith("tests."):
            values += [vars(module)[name] for name in names & vars(module).keys()]
    names |= {_home(value).partition(".")[0] for value in values}  # `from subprocess import run`
    ours = [value for value in values if _home(value).startswith("tests.")]
    return frozenset(names), tuple(part for value in ours for part in _parts(value))


def _parts(value: Any) -> Iterator[FunctionType]:
    """The functions in a function, a class or an instance."""
    value = inspect.unwrap(value) if callable(value) else value
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod, MethodType)):
        yield from _parts(value.__func__)
    elif isinstance(value, property):
        yield from _parts(value.fget)
    elif isinstance(value, functools.partial):
        yield from _parts(value.func)
    else:
        for member in vars(value if isinstance(value, type) else type(value)).values():
            if isinstance(member, (FunctionType, staticmethod, classmethod, property)):
                yield from _parts(member)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _home(value: Any) -> str:
    return str(getattr(value, "__module__", None) or "")


STARTED: list[str] = []  # what this process has started since the list was last cleared


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        STARTED.append(f"{event}{arguments[:2]}")


sys.addaudithook(_hear)
