"""Finds the names of deepspeed that a source uses: imports, and attribute chains that start with an imported name.

`python -m tests.support.taken_names FOLDER_OR_WHEEL...` adds them to the table that a test resolves.
"""

from __future__ import annotations

import argparse
import ast
import json
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "integration" / "data" / "taken_names.json"
_ROOT = "deepspeed"


def taken(text: str) -> set[str]:
    """Dotted names below deepspeed; empty if the text is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes in other projects' sources
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return set()
    found: set[str] = set()
    known: dict[str, str] = {}  # what a name in the source refers to
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_ours(alias.name):
                    found.add(alias.name)
                    known[alias.asname or _ROOT] = alias.name if alias.asname else _ROOT
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_ours(node.module or ""):
            for alias in node.names:
                name = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
                found.add(str(name))
                known[alias.asname or alias.name] = str(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            root, _, rest = _chain(node).partition(".")
            if root in known:
                found.add(f"{known[root]}.{rest}")
    longer = {name.rpartition(".")[0] for name in found}
    return {name for name in found if name not in longer or name == _ROOT}


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == _ROOT


def _chain(node: ast.expr) -> str:
    """`a.b.c`; "" if the chain does not begin with a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _chain(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def sources(place: Path) -> Iterator[str]:
    """Every Python file of a folder or wheel that mentions deepspeed."""
    if place.is_file():
        with zipfile.ZipFile(place) as wheel:
            for name in wheel.namelist():
                if name.endswith(".py") and b"deepspeed" in (content := wheel.read(name)):
                    yield content.decode("utf-8", "replace")
        return
    for path in place.rglob("*.py"):
        if b"deepspeed" in (content := path.read_bytes()):
            yield content.decode("utf-8", "replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("places", nargs="+", type=Path, help="folders and wheels, which begin with the package's name")
    table: dict[str, list[str]] = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    for place in parser.parse_args().places:
        who = place.name.partition("-")[0]
        for text in sources(place):
            for name in taken(text):
                table[name] = sorted({*table.get(name, ()), who})
    rows = (f"{json.dumps(name)}: {json.dumps(table[name])}" for name in sorted(table))
    TABLE.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
