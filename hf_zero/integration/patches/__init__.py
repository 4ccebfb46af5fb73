"""hf_zero's patches to functions of transformers, accelerate, peft, trl and torch: one file per library, and one more
for each module that has many of them, named after it with underscores for dots.

The import hook applies a module's patches right after it has been loaded. If a target is missing or has other
parameters, upstream's code stays.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ClassVar

from hf_zero.errors import listen
from hf_zero.log import log_dist

MARK = "_hf_zero_original"
FLOOR = "the floor in setup.cfg"

Function = Callable[..., Any]


class Misfit(Exception):
    """Raised if upstream's function differs from the one that the patch was written for."""


@dataclass(frozen=True)
class Patch:
    """One function of another library, and the wrapper around it."""

    module: str
    place: str  # a function, or Class.method
    parameters: str  # the expected ones, "self, model"; other signatures are not patched
    around: Function  # called with the original and its arguments; its docstring has the reason for the patch
    without: str  # what does not work without the patch: the end of the log line
    until: str  # the upstream change that would make the patch unnecessary
    older: tuple[str, ...] = ()  # parameters in older versions, which `around` also accepts
    since: str = FLOOR  # the first library version with this signature
    importers: tuple[str, ...] = ()  # modules that import the function by name

    def find(self, module: ModuleType) -> tuple[Any, str, Function]:
        """The holder, the name and the original.

        Raises:
            Misfit: if the name is missing, or takes other parameters.
        """
        holder, name, original = _look(module, self.place)
        if isinstance(original, property) and original.fget is not None:
            original = original.fget
        if not callable(original):
            raise Misfit("is not there")
        parameters = ", ".join(inspect.signature(original).parameters)
        if parameters not in (self.parameters, *self.older):
            raise Misfit(f"takes ({parameters}), not ({self.parameters})")
        return holder, name, original

    def apply(self, module: ModuleType) -> None:
        """Install the replacement."""
        holder, name, original = self.find(module)
        if hasattr(original, MARK):
            return
        around = self.around

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return around(original, *args, **kwargs)

        setattr(replacement, MARK, original)
        kind = type(inspect.getattr_static(holder, name))
        setattr(holder, name, kind(replacement) if kind in (staticmethod, property) else replacement)
        for importer in map(sys.modules.get, self.importers):
            if getattr(importer, name, None) is original:
                setattr(importer, name, replacement)


def _look(module: ModuleType, place: str) -> tuple[Any, str, Any]:
    """The holder of a place, the name there, and its value; None if there is none."""
    *parents, name = place.split(".")
    holder: Any = module
    for parent in parents:
        holder = getattr(holder, parent, None)
    return holder, name, getattr(holder, name, None)


class Patches:
    """The patches of one module, in the order in which they are applied."""

    of: ClassVar[dict[str, Patches]] = {}

    def __init__(self, module: str) -> None:
        self.module = module
        self._all: list[Patch] = []
        self.of[module] = self

    def __iter__(self) -> Iterator[Patch]:
        return iter(self._all)

    def add(self, target: str, *, without: str, until: str, **more: Any) -> Callable[[Function], Function]:
        """Decorator that registers a replacement for `target`, "Class.method(self, argument)"."""
        place, _, parameters = target.rstrip(")").partition("(")

        def register(around: Function) -> Function:
            self._all.append(Patch(self.module, place, parameters, around, without, until, **more))
            return around

        return register


def patches_of(module: str) -> Patches:
    """The patches of a module in `startup.PATCHED`, from the file with the longest matching name."""
    parts = module.split(".")
    names = (f"{__name__}.{'_'.join(parts[:length])}" for length in range(len(parts), 0, -1))
    import_module(next(filter(find_spec, names)))
    return Patches.of[module]


def patch(module: ModuleType) -> None:
    """Apply all patches of a newly loaded module. Never raises, because upstream works without them."""
    listen()
    try:
        patches = patches_of(module.__name__)
    except Exception as error:
        _warn(f"{_library(module.__name__)}: {module.__name__} is not patched ({type(error).__name__}: {error})")
        return
    apply(patches, module)


def apply(patches: Iterable[Patch], module: ModuleType) -> None:
    """Apply the matching patches, and log a line for each of the others."""
    for one in patches:
        try:
            one.apply(module)
        except Misfit as misfit:
            _leave_alone(one, str(misfit))
        except Exception as error:
            _leave_alone(one, f"is not patched ({type(error).__name__}: {error})")


def _leave_alone(one: Patch, reason: str) -> None:
    """Log one line about a patch that does not fit this version of a library."""
    place = f"{one.module}.{one.place}"
    _warn(f"{_library(one.module)}: {place} {reason}; hf_zero leaves it as it is: {one.without}")


def _library(module: str) -> str:
    name = module.partition(".")[0]
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{name} of an unknown version"


def _warn(message: str) -> None:
    """Warn on one rank only."""
    log_dist(" ".join(message.split()), level=logging.WARNING)
