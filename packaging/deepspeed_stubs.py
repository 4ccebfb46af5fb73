"""Prints the stubs of `deepspeed` as JSON: file in a wheel -> text; packaging/backend.py puts them there.

No package `deepspeed` is on disk, so type checkers and editors find nothing to `import deepspeed`. Each stub re-exports
hf_zero's own classes and functions under DeepSpeed's names, from the tables by which the import hook finds them
(hf_zero/integration/names). Any other name is `Any`: a program may also run with a real DeepSpeed. Needs only the
standard library; run it with -S, because the start-up hook of an installed hf_zero would import other tables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from hf_zero.integration import names  # noqa: E402

_HEAD = "from typing import Any\n"
_REST = "def __getattr__(name: str) -> Any: ...\n"


def exports() -> dict[str, dict[str, str]]:
    """Module without `deepspeed.` -> name -> the line that exports it.

    Modules are those with names of hf_zero's own, and packages, which pass on those of their modules. Builders of ops
    are left out: they are classes that are made when they are asked for.
    """
    homes = {module: dict(each) for module, each in names.all_homes().items()}
    for module, row in names.known_modules().items():
        for name, source in row.get("borrowed", {}).items() if "package" in row else ():
            if name in names.homes_of(source):
                homes.setdefault(module, {}).setdefault(name, names.homes_of(source)[name])
    builders = names.homes_of("ops.op_builder").keys()
    lines = {
        module: {name: _line(*home.rsplit(".", 1), name) for name, home in each.items() if name not in builders}
        for module, each in homes.items()
    }
    lines |= {module: {"*": f"from {same} import *"} for module, same in names.SAME_MODULE.items()}
    lines[""]["__version__"] = "__version__: str"
    return {module: each for module, each in lines.items() if each}


def _line(module: str, theirs: str, name: str) -> str:
    return f"from {module} import {theirs} as {name}"


def files() -> dict[str, str]:
    table = exports()
    modules = set(table)
    for module in table:
        parts = module.split(".")
        modules |= {".".join(parts[:length]) for length in range(len(parts))}
    children: dict[str, list[str]] = {}
    for module in modules - {""}:
        parent, _, name = module.rpartition(".")
        children.setdefault(parent, []).append(name)
    written = {"deepspeed-stubs/py.typed": "partial\n"}
    for module in modules:
        path = "/".join(["deepspeed-stubs", *filter(None, module.split("."))])
        path += "/__init__.pyi" if module in children else ".pyi"
        written[path] = _text(module, table.get(module, {}), children.get(module, []))
    return dict(sorted(written.items()))


def _text(module: str, lines: Mapping[str, str], children: list[str]) -> str:
    own = [line for _, line in sorted(lines.items())]
    inner = [_line(f"deepspeed.{module}".rstrip("."), name, name) for name in sorted(set(children) - set(lines))]
    return "\n".join([_HEAD, *inner, *own, "", _REST])


if __name__ == "__main__":
    sys.stdout.write(json.dumps(files()))
