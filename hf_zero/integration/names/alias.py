"""Parts of the alias package: modules whose names load on first use, errors for those we lack, and its metadata."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from pathlib import Path
from types import ModuleType

from hf_zero.integration.names.unsupported import (
    FEATURES,
    ROOT,
    SAME_MODULE,
    all_homes,
    children,
    find,
    homes_of,
    is_package,
    known_modules,
    known_names,
    refusal,
)
from hf_zero.surface import VERSION

PACKAGE = Path(__file__).resolve().parents[2]
COPIED = {"utils.zero_to_fp32": "zero_to_fp32.py"}  # scripts that programs copy beside their checkpoints
_METADATA = {
    "METADATA": (
        f"Metadata-Version: 2.1\nName: {ROOT}\nVersion: {VERSION}\n"
        "Summary: hf_zero answering as deepspeed\nLicense: Apache-2.0\n"
    ),
    "INSTALLER": "hf_zero\n",
    "top_level.txt": f"{ROOT}\n",
}


def lazy_names(module: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of an alias module.

    Names with a home are ours. What DeepSpeed's module has beyond them can be imported too, and refuses to be used.
    """
    path = module.partition(".")[2]

    def __getattr__(name: str) -> object:
        homes = homes_of(path)
        if name in homes:
            home, _, attribute = homes[name].rpartition(".")
            # Kept in the module: the second access is a plain lookup, and user code may replace it.
            return vars(sys.modules[module]).setdefault(name, getattr(import_module(home), attribute))
        inner = f"{path}.{name}" if path else name
        if inner in SAME_MODULE or inner in known_modules():
            return import_module(f"{ROOT}.{inner}")
        try:
            return vars(sys.modules[module]).setdefault(name, find(path, name))
        except LookupError:
            error = AttributeError(_missing(f"{module}.{name}"), name=name, obj=sys.modules.get(module))
            raise error from None

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[module]), *homes_of(path), *known_names(path), *children(path)})

    return __getattr__, __dir__


def missing_module(name: str) -> ModuleNotFoundError:
    # `name` is the home we lack. Were it the name asked for, `from deepspeed import x` would swallow this text and
    # say "cannot import name" instead.
    return ModuleNotFoundError(_missing(name), name=f"hf_zero.integration.{name}")


def _missing(name: str) -> str:
    return (
        f"hf_zero answers as deepspeed here and has no {name!r}: {FEATURES}. "
        "To use a real DeepSpeed instead, install it and leave HF_ZERO unset."
    )


class GeneratedLoader:
    """Makes a module of the alias package: its names, taken from the tables on demand."""

    def create_module(self, spec: ModuleSpec) -> None:
        """None: an ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        path = module.__name__.partition(".")[2]
        if path in SAME_MODULE:
            sys.modules[module.__name__] = import_module(SAME_MODULE[path])
            return
        if path in COPIED:
            # Not by __getattr__: inspect asks every module for its file, also in the middle of an import.
            module.__file__ = str(PACKAGE / COPIED[path])
        built = f"Names of DeepSpeed, from where hf_zero keeps them (homes.json): deepspeed.{path}."
        module.__doc__ = built if _has_names_of_ours(path) else refusal(path)
        vars(module)["__getattr__"], vars(module)["__dir__"] = lazy_names(module.__name__)

    def get_code(self, name: str) -> object:
        """The code that `python -m` runs: the module's main()."""
        return compile(f"import sys\nfrom {name} import main\nsys.exit(main())", name, "exec")


def _has_names_of_ours(path: str) -> bool:
    borrowed = known_modules().get(path, {}).get("borrowed", {}) if is_package(path) else {}
    return bool(homes_of(path)) or any(name in homes_of(module) for name, module in borrowed.items())


def generated_spec(name: str) -> ModuleSpec | None:
    """The spec of a module `deepspeed....`; None where neither DeepSpeed nor we have such a one."""
    path = name.partition(".")[2]
    if path not in known_modules() and path not in all_homes() and path not in SAME_MODULE:
        return None
    return ModuleSpec(name, GeneratedLoader(), origin=__file__, is_package=is_package(path))  # type: ignore[arg-type]


class AliasDistribution(Distribution):
    """A distribution that exists in memory only: nothing named deepspeed lies in site-packages."""

    def __init__(self, folder: str) -> None:
        """`folder`: where the alias package lies."""
        self._root = os.path.dirname(folder)

    def read_text(self, filename: str) -> str | None:
        return _METADATA.get(str(filename))

    def locate_file(self, path: str | os.PathLike[str]) -> Path:
        return Path(self._root, path)
