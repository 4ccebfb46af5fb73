"""What every module of the alias package is made of: names that load on first use, and errors for those we lack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module

VERSION = "0.19.8+hf.zero"
"""The DeepSpeed version whose interface we answer with; the local part tells who really answers."""

FEATURES = "docs/features.md in the hf_zero repository lists what exists"


def lazy_names(
    module: str, names: Mapping[str, str], submodules: Collection[str] = (), why_absent: str = ""
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of an alias module.

    names: public name -> dotted home in hf_zero, last part the attribute. submodules: importable children of `module`.
    why_absent: what a user should know first when a name is missing here.
    """

    def __getattr__(name: str) -> object:
        if name in names:
            home, _, attribute = names[name].rpartition(".")
            # Kept in the module: the second access is a plain lookup, and user code may replace it.
            return vars(sys.modules[module]).setdefault(name, getattr(import_module(home), attribute))
        if name in submodules:
            return import_module(f"{module}.{name}")
        raise missing_name(module, name, why_absent)

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module]), *names, *submodules})

    return __getattr__, __dir__


def missing_name(module: str, name: str, why: str = "") -> AttributeError:
    return AttributeError(f"{why}{_missing(f'{module}.{name}')}", name=name, obj=sys.modules.get(module))


def missing_module(name: str) -> ModuleNotFoundError:
    # `name` is the home we lack. Were it the name asked for, `from deepspeed import x` would swallow this text and
    # say "cannot import name" instead.
    return ModuleNotFoundError(_missing(name), name=f"hf_zero.integration.{name}")


def _missing(name: str) -> str:
    return (
        f"hf_zero answers as deepspeed here and has no {name!r}: {FEATURES}. "
        "To use a real DeepSpeed instead, install it and leave HF_ZERO unset."
    )
