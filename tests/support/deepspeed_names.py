"""Reads the names of an installed DeepSpeed: module paths, public names and their kinds, constants.

The sources are parsed, not imported. `python -m tests.support.deepspeed_names FOLDER_OF_DEEPSPEED` writes the tables
that the alias package and the tests read.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_zero.integration.names import definers

ROOT = Path(__file__).resolve().parents[2]
NAMES = ROOT / "hf_zero" / "integration" / "names" / "names.json"
MODULES = ROOT / "tests" / "integration" / "data" / "deepspeed_modules.txt"
SURFACES = ROOT / "tests" / "integration" / "data" / "deepspeed_surfaces.json"
ACCELERATOR = ROOT / "tests" / "integration" / "data" / "accelerator_methods.txt"
MAX_TEXT, MAX_LIST = 80, 12
SURFACE_CLASSES = {
    "DeepSpeedEngine": ("runtime.engine", "DeepSpeedEngine"),
    "DeepSpeedZeroOptimizer (stages 1, 2)": ("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    "DeepSpeedZeroOptimizer_Stage3": ("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    "BF16_Optimizer": ("runtime.bf16_optimizer", "BF16_Optimizer"),
    "FP16_Optimizer": ("runtime.fp16.fused_optimizer", "FP16_Optimizer"),
    "FP16_UnfusedOptimizer": ("runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"),
    "ZeROOptimizer (base of those above)": ("runtime.base_optimizer", "ZeROOptimizer"),
}

_BUILDERS = "ops.op_builder"


@dataclass
class Module:
    """Definitions of one file. `borrowed`: name -> (module of DeepSpeed that it comes from, its name there)."""

    is_package: bool
    classes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    borrowed: dict[str, tuple[str, str]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)


def read_tree(folder: Path) -> dict[str, Module]:
    """Every module under `folder`, by its path without `deepspeed.`; the package itself is ""."""
    found: dict[str, Module] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        parts = parts[:-1] if is_package else parts
        if all(part.isidentifier() for part in parts):
            name = ".".join(parts)
            found[name] = _read(ast.parse(path.read_text(encoding="utf-8")), name, is_package)
    for name in list(found):
        while "." in name:  # folders without an __init__.py are packages too
            name = name.rpartition(".")[0]
            found.setdefault(name, Module(is_package=True))
    return found


def _read(tree: ast.Module, name: str, is_package: bool) -> Module:
    module = Module(is_package)
    for statement in _statements(tree.body):
        if isinstance(statement, ast.ClassDef):
            is_error = any(ast.unparse(base).endswith(("Error", "Exception")) for base in statement.bases)
            (module.errors if is_error else module.classes).append(statement.name)
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            module.functions.append(statement.name)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                if isinstance(target, ast.Name):
                    _note_value(module, target.id, statement.value)
        elif isinstance(statement, ast.AnnAssign):
            if isinstance(statement.target, ast.Name) and statement.value is not None:
                _note_value(module, statement.target.id, statement.value)
        elif isinstance(statement, ast.ImportFrom):
            _note_import(module, statement, name)
    return module


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from _statements([*statement.body, *statement.orelse])
            for handler in getattr(statement, "handlers", []):
                yield from _statements(handler.body)


def _note_value(module: Module, name: str, node: ast.expr) -> None:
    if isinstance(node, ast.Name) and node.id in module.values:
        module.values[name] = module.values[node.id]
        return
    try:
        value = _evaluated(node)
    except (ValueError, TypeError):
        return
    if name.isupper() and (value is None or _is_plain(value)):  # other names are state, not constants
        module.values[name] = list(value) if isinstance(value, tuple) else value


def _evaluated(node: ast.expr) -> Any:
    """The value of a literal, or of a sum, product or power of numbers, such as 1024**2."""
    if not isinstance(node, ast.BinOp):
        return ast.literal_eval(node)
    left, right = _evaluated(node.left), _evaluated(node.right)
    if isinstance(left, int | float) and isinstance(right, int | float):
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Pow):
            return left**right
    raise ValueError("not a number")


def _is_plain(value: object) -> bool:
    """Whether a value is a key, a number, a flag or a short list of them; sentences are not part of an interface."""
    if isinstance(value, str):
        return len(value) <= MAX_TEXT and not any(letter.isspace() for letter in value)
    if isinstance(value, list | tuple):
        return len(value) <= MAX_LIST and all(isinstance(part, str | int) and _is_plain(part) for part in value)
    return isinstance(value, bool | int | float)


def _note_import(module: Module, statement: ast.ImportFrom, name: str) -> None:
    source = statement.module or ""
    if statement.level:
        around = name.split(".") if name else []
        around = around if module.is_package else around[:-1]
        around = around[: len(around) - (statement.level - 1)]
        source = ".".join([*around, *([source] if source else [])])
    elif source.split(".")[0] != "deepspeed":
        return
    else:
        source = source.partition(".")[2]
    for alias in statement.names:
        if alias.name == "*":
            module.stars.append(source)
        else:
            module.borrowed[alias.asname or alias.name] = (source, alias.name)


def table(tree: dict[str, Module]) -> dict[str, dict[str, Any]]:
    """The content of names.json: for each module its kind, own public names, constants, and re-exported names."""
    rows = {}
    for name, module in sorted(tree.items()):
        row: dict[str, Any] = {"package": True} if module.is_package else {}
        for kind in ("classes", "errors", "functions"):
            names = sorted({own for own in getattr(module, kind) if not own.startswith("_")})
            if names:
                row[kind] = " ".join(names)
        values = {own: value for own, value in sorted(module.values.items()) if not own.startswith("_")}
        if values:
            row["values"] = values
        borrowed = _borrowed(tree, name)
        if borrowed:
            row["borrowed"] = dict(sorted(borrowed.items()))
        stars = sorted(star for star in module.stars if star in tree)
        if stars and not module.is_package:  # a package's star imports are among its re-exports
            row["stars"] = " ".join(stars)
        rows[name] = row
    return rows


def packed(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The table as in names.json: `uses` for re-exported names that one module alone defines, others by module."""
    found = definers(rows)
    table = {}
    for name, row in rows.items():
        borrowed = row.get("borrowed", {})
        uses = sorted(own for own, home in borrowed.items() if found.get(own) == [home])
        others: dict[str, list[str]] = {}
        for own in sorted(set(borrowed) - set(uses)):
            others.setdefault(borrowed[own], []).append(own)
        table[name] = {kind: value for kind, value in row.items() if kind != "borrowed"}
        if uses:
            table[name]["uses"] = " ".join(uses)
        if others:
            table[name]["borrowed"] = {home: " ".join(names) for home, names in sorted(others.items())}
    return table


def _borrowed(tree: dict[str, Module], name: str) -> dict[str, str]:
    """Name -> defining module, for names that a module re-exports: programs import them from either."""
    module, found = tree[name], {}
    wanted = dict(module.borrowed)
    for star in module.stars if module.is_package else ():
        wanted.update({own: (star, own) for own in _public(tree, star)})
    for own, (source, original) in wanted.items():
        home = _home(tree, source, original)
        if home is not None and not own.startswith("_") and original == own:
            found[own] = home
    return found


def _public(tree: dict[str, Module], name: str) -> set[str]:
    module = tree.get(name)
    if module is None:
        return set()
    own = {*module.classes, *module.errors, *module.functions, *module.values, *module.borrowed}
    for star in module.stars:
        own |= _public(tree, star)
    return {word for word in own if not word.startswith("_")}


def _home(tree: dict[str, Module], source: str, name: str, depth: int = 0) -> str | None:
    module = tree.get(source)
    if module is None or depth > 8:
        return None
    if source == _BUILDERS and name.endswith("Builder"):
        return source  # defined when the module is imported
    if name in (*module.classes, *module.errors, *module.functions) or name in module.values:
        return source
    if name in module.borrowed:
        return _home(tree, *module.borrowed[name], depth + 1)
    homes = (_home(tree, star, name, depth + 1) for star in module.stars)
    return next((home for home in homes if home is not None), None)


def surfaces(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Public methods and attributes of DeepSpeed's engine and optimizers, as their sources define and assign them."""
    found = {}
    for title, (module, name) in SURFACE_CLASSES.items():
        body = _class(folder, module, name)
        methods = {node.name for node in body.body if isinstance(node, ast.FunctionDef)}
        methods |= {t.id for n in body.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
        attributes = {
            node.attr
            for node in ast.walk(body)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
        }
        found[title] = {
            "methods": sorted(word for word in methods if not word.startswith("_")),
            "attributes": sorted(word for word in attributes - methods if not word.startswith("_")),
        }
    return found


def _accelerator(folder: Path) -> list[str]:
    """The methods that every accelerator of DeepSpeed has."""
    found = _class(folder, "accelerator.abstract_accelerator", "DeepSpeedAccelerator")
    return [node.name for node in found.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _class(folder: Path, module: str, name: str) -> ast.ClassDef:
    tree = ast.parse((folder / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8"))
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


def write_lines(rows: dict[str, Any]) -> str:
    """JSON with one line per entry, so that a change of one module changes one line."""
    lines = (f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def texts(folder: Path) -> dict[Path, str]:
    """Every file this script writes, with its content."""
    tree = read_tree(folder)
    return {
        NAMES: write_lines(packed(table(tree))),
        MODULES: "".join(f"{name}\n" for name in sorted(tree) if name),
        SURFACES: write_lines(surfaces(folder)),
        ACCELERATOR: "".join(f"{name}\n" for name in _accelerator(folder)),
    }


if __name__ == "__main__":
    for path, text in texts(Path(sys.argv[1])).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
