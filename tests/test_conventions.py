"""The project's conventions as rules for its sources: sizes, terms, and a test for every module of the engine.

Exceptions are listed here with their reasons. Lists only shrink: a test fails as soon as an entry is unnecessary.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.test_imports import PACKAGE, ROOT, nodes_of, package_of, sources
from tests.test_imports import trees as trees_by_module

MAX_FILE_LINES = 575  # with 400, files that belong together had been split
MAX_BODY_LINES = 60
MAX_METHODS = 20
MAX_MODULES = 20
MIN_FILE_LINES = 40
MAX_SMALL_FILES = 6

# File -> maximum number of lines, and why.
LONG_FILES: dict[str, tuple[int, str]] = {}

# Class -> maximum number of methods, and why.
LARGE_CLASSES: dict[str, tuple[int, str]] = {}

_PER_KERNEL = "one file per kernel"

# File -> why it is small.
SMALL_FILES = {
    "integration/distribution.py": "needed only for importlib.metadata",
    "integration/patches/torch.py": "one file per patched library",
    "kernels/gpu/norm.py": _PER_KERNEL,
    "kernels/message.py": "imported from layout, which must not import torch",
    "kernels/norm.py": _PER_KERNEL,
    "optim/sgd.py": "one file per optimizer",
}

# Old term -> its replacement.
REPLACED_WORDS = {
    "adopt_edits": "sync_masters",
    "birth": "init_rules, or what the constructor does",
    "cut_chunk": "local_chunk",
    "furnish": "attach_offload",
    "gatherer": "coordinator",
    "honoured": "supported",
    "inert": "ignored",
    "let_go": "reshard, of parameters; release, of buffers",
    "make_whole": "unshard or unpartition",
    "narrow": "lp (low precision): lp_param",
    "narrow_masters": "low_precision_masters",
    "obituary": "dead_ranks",
    "owed": "error (error feedback)",
    "portion": "sub_group",
    "publish": "all_gather_params",
    "residency": "gather_plan",
    "seat": "rank_environment",
    "shelf": "stager",
    "stray": "unfilled",
    "take_back": "roll_back",
    "takeover": "patch",
    "unbuilt": "unsupported",
}
REPLACED_IN_PARAMS = {"scope": "hooked_module or gathered_module"}

_HOLDS_BACK = "of a reducer: the opposite of hold_back"

# (file, identifier) -> why it may stay.
KEPT_WORDS = {
    ("config/load.py", "_make_whole"): "of a number: 5e8 in a config is an integer",
    ("extras/one_bit/__init__.py", "_not_published"): "of an algorithm: not part of the paper",
}


ENGINE_PACKAGES = frozenset(
    ("layout", "device", "comm", "offload", "optim", "params", "grads", "step", "checkpoint", "schedules", "kernels")
    + ("extras", "features", "profiling", "sequence", "spans", "tensor", "tiling", "activations")
)

_SAVED_AND_LOADED = "by saving and loading whole checkpoints: tests/checkpoint"
_BY_NAME = "imported by name: tests/kernels/cases.py"

_BY_CONFIG = "tested with a whole config: its extra's test_config.py"

# Module without tests of its own -> the tests that run it.
UNTESTED = {
    "hf_zero.checkpoint.deepspeed.read": _SAVED_AND_LOADED,
    "hf_zero.checkpoint.deepspeed.state_dicts": _SAVED_AND_LOADED,
    "hf_zero.checkpoint.load": _SAVED_AND_LOADED,
    "hf_zero.checkpoint.subject": _SAVED_AND_LOADED,
    "hf_zero.extras.autotuning.trial_run": "the script of a trial: tests/extras/autotuning/test_tuning.py",
    "hf_zero.extras.compression.rules": _BY_CONFIG,
    "hf_zero.extras.data_efficiency.rules": _BY_CONFIG,
    "hf_zero.kernels.gpu.adagrad": _BY_NAME,
    "hf_zero.kernels.gpu.blocks": "shared by the kernels that tests/kernels/cases.py imports by name",
    "hf_zero.kernels.gpu.frozen_adam": _BY_NAME,
    "hf_zero.kernels.gpu.lion": _BY_NAME,
    "hf_zero.kernels.gpu.sgd": _BY_NAME,
}


@functools.cache
def texts() -> dict[str, str]:
    """Path inside the package -> source."""
    root = ROOT / PACKAGE
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sources().values()}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Path inside the package -> syntax tree."""
    root = ROOT / PACKAGE
    return {sources()[module].relative_to(root).as_posix(): tree for module, tree in trees_by_module().items()}


def num_lines(source: str) -> int:
    return len(source.splitlines())


def beyond(found: Mapping[str, int], limit: int, exceptions: Mapping[str, tuple[int, str]]) -> list[str]:
    """Sizes above the limit, and unnecessary exceptions."""
    too_large = [
        f"{name}: {number} (at most {most})"
        for name, number in found.items()
        if number > (most := exceptions.get(name, (limit, ""))[0])
    ]
    idle = [f"{name}: no exception any more" for name in exceptions if found.get(name, 0) <= limit]
    return sorted([*too_large, *idle])


# Sizes


def test_no_file_is_longer_than_one_concern_needs() -> None:
    assert beyond({path: num_lines(text) for path, text in texts().items()}, MAX_FILE_LINES, LONG_FILES) == []


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the last."""
    has_more = ast.get_docstring(function) is not None and len(function.body) > 1
    last = function.end_lineno
    assert last is not None, "parsed from text"
    return last - function.body[has_more].lineno + 1


def test_no_function_is_longer_than_a_page() -> None:
    found = {
        f"{path}: {node.name} (line {node.lineno})": body_lines(node)
        for path, tree in trees().items()
        for node in nodes_of(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert beyond(found, MAX_BODY_LINES, {}) == []


def num_methods(node: ast.ClassDef) -> int:
    """A property and its setter count as one."""
    return len({part.name for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))})


def test_no_class_has_more_methods_than_a_reader_remembers() -> None:
    found = {
        f"{path}: {node.name}": num_methods(node)
        for path, tree in trees().items()
        for node in nodes_of(tree)
        if isinstance(node, ast.ClassDef)
    }
    assert beyond(found, MAX_METHODS, LARGE_CLASSES) == []


def test_no_room_has_more_modules_than_one_looks_through() -> None:
    modules = Counter(str(Path(path).parent) for path in texts() if not path.endswith("__init__.py"))
    assert beyond(modules, MAX_MODULES, {}) == []


def test_small_files_are_few_and_have_a_reason() -> None:
    small = {
        path
        for path, text in texts().items()
        if num_lines(text) < MIN_FILE_LINES and Path(path).stem not in {"__init__", "__main__"}
    }
    assert len(SMALL_FILES) <= MAX_SMALL_FILES
    assert sorted(small - SMALL_FILES.keys()) == [], "these belong to a neighbour"
    assert sorted(SMALL_FILES.keys() - small) == [], "these are not small any more, or gone: take them from the list"


# Words


def replaced_in(path: str, source: str) -> Iterator[tuple[int, str, str, str]]:
    """Line, identifier, old word, new word, for every identifier that contains an old word."""
    table = {**REPLACED_WORDS, **(REPLACED_IN_PARAMS if path.startswith("params/") else {})}
    if not any(words_in(word, tuple(table)) for word in set(re.findall(r"[A-Za-z_]\w*", source))):
        return  # a fast check that excludes most files
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for before, token, after in zip([tokens[0], *tokens], tokens, [*tokens[1:], tokens[-1]]):
        if token.type != tokenize.NAME:
            continue
        if token.string == "narrow" and (before.string, after.string) == (".", "("):
            continue  # Tensor.narrow
        for old in words_in(token.string, tuple(table)):
            yield token.start[0], token.string, old, table[old]


@functools.cache
def words_in(identifier: str, words: tuple[str, ...]) -> list[str]:
    """Those of `words` that `identifier` contains, alone or with an ending."""
    spelled = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower()
    return [word for word in words if re.search(rf"(?:^|_){word}(?:s|es|ed|d|ing)?(?:_|$)", spelled)]


@functools.cache
def all_replaced() -> list[tuple[str, int, str, str, str]]:
    return [(path, *found) for path, text in texts().items() for found in replaced_in(path, text)]


def test_replaced_words_stay_replaced() -> None:
    found = [
        f"{path}:{line}: {identifier} says {old!r}; say {new}"
        for path, line, identifier, old, new in all_replaced()
        if (path, identifier) not in KEPT_WORDS
    ]
    found += [
        f"{path}: the file's name says {old!r}; say {new}"
        for path in texts()
        for name in Path(path).with_suffix("").parts
        for old, new in REPLACED_WORDS.items()
        if old in words_in(name, tuple(REPLACED_WORDS))
    ]
    assert found == []


def test_kept_words_are_still_there() -> None:
    found = {(path, identifier) for path, _, identifier, _, _ in all_replaced()}
    assert sorted(KEPT_WORDS.keys() - found) == [], "take these from the list"


@pytest.mark.parametrize(
    ("path", "source", "words"),
    [
        ("step/a.py", "def take_back(): ...", ["take_back"]),
        ("step/a.py", "class GathererOfRows: ...", ["gatherer"]),
        ("step/a.py", "self._shelf.x", ["shelf"]),
        ("step/a.py", "num_portions = 3", ["portion"]),
        ("step/a.py", "narrow = x.narrow(0, 1, 2)", ["narrow"]),
        ("step/a.py", "narrow_masters = True", ["narrow", "narrow_masters"]),
        ("params/a.py", "for scope in scopes: ...", ["scope", "scope"]),
        ("step/a.py", "scope = 1", []),
        ("step/a.py", "x.narrow(0, 1, 2)  # a seat", []),
        ("step/a.py", "allowed = '''a shelf'''", []),
        ("step/a.py", "inertia = borrowed + nearest", []),
    ],
)
def test_words_are_found_in_identifiers_alone(path: str, source: str, words: list[str]) -> None:
    assert [old for _, _, old, _ in replaced_in(path, source)] == words


def test_sizes_are_measured() -> None:
    function = ast.parse("def f():\n    '''Doc\n    string.'''\n    a = 1\n\n    return a\n").body[0]
    assert isinstance(function, ast.FunctionDef) and body_lines(function) == 3
    kind = ast.parse("class A:\n    @property\n    def a(self): ...\n    @a.setter\n    def a(self, v): ...\n").body[0]
    assert isinstance(kind, ast.ClassDef) and num_methods(kind) == 1
    assert beyond({"a": 5, "b": 3}, 4, {}) == ["a: 5 (at most 4)"]
    assert beyond({"a": 5, "b": 3}, 4, {"a": (5, "")}) == []
    assert len(beyond({"a": 6, "b": 3}, 4, {"a": (5, ""), "b": (5, ""), "gone": (9, "")})) == 3


# Tests


def homes_of(module: str, name: str, modules: Mapping[str, ast.Module]) -> set[str]:
    """Where `from module import name` finds it: a module, or a package that re-exports it."""
    if f"{module}.{name}" in modules:
        return {f"{module}.{name}"}
    found = {module} & modules.keys()
    is_room = found and any(other.startswith(f"{module}.") for other in modules)
    for node in modules[module].body if is_room else ():
        if isinstance(node, ast.ImportFrom) and node.module and name in {a.asname or a.name for a in node.names}:
            found |= homes_of(node.module, name, modules)
    return found


def imports_alone(source: str) -> ast.Module:
    """A source's imports from the package only, because parsing all tests takes seconds."""
    form = rf"^[ \t]*((?:from {PACKAGE}[\w.]* import (?:\([\w\s,#]*\)|[\w ,]+)|import {PACKAGE}[\w., ]*))"
    return ast.parse("\n".join(re.findall(form, source, re.MULTILINE)))


def imported_by(tree: ast.Module, modules: Mapping[str, ast.Module]) -> set[str]:
    """Those of `modules` that a test imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules.keys()
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = found.union(*(homes_of(node.module, alias.name, modules) for alias in node.names))
    return found


def untested(modules: Mapping[str, ast.Module], tests: Iterable[ast.Module]) -> set[str]:
    """The modules of the engine's packages that no test imports."""
    tested = set[str]().union(*(imported_by(test, modules) for test in tests))
    return {module for module in modules if package_of(module) in ENGINE_PACKAGES} - tested


def test_every_module_of_the_engine_is_imported_by_a_test() -> None:
    modules = trees_by_module()
    tests = [imports_alone(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "tests").rglob("*.py"))]
    packages = {module for module, path in sources().items() if path.name == "__init__.py"}
    found = untested(modules, tests) - packages
    assert sorted(found - UNTESTED.keys()) == [], "write a test that imports these"
    assert sorted(UNTESTED.keys() - found) == [], "these have one, or are gone: take them from the list"


def test_imports_are_followed_through_packages_and_no_further() -> None:
    sources = {
        "hf_zero.layout": "from hf_zero.layout.units import lay_rows",
        "hf_zero.layout.units": "from hf_zero.layout.buckets import Bucket\ndef lay_rows(): ...",
        "hf_zero.layout.buckets": "class Bucket: ...",
        "hf_zero.config": "",
    }
    modules = {module: ast.parse(source) for module, source in sources.items()}

    def left(test: str) -> set[str]:
        return untested(modules, [ast.parse(test)]) - {"hf_zero.layout"}

    assert left("") == {"hf_zero.layout.units", "hf_zero.layout.buckets"}
    assert left("from hf_zero.layout import lay_rows") == {"hf_zero.layout.buckets"}
    assert left("from hf_zero.layout.units import Bucket") == {"hf_zero.layout.buckets"}
    assert left("def f():\n    from hf_zero.layout import buckets") == {"hf_zero.layout.units"}
    assert left("import hf_zero.layout.units, hf_zero.layout.buckets") == set()


def test_imports_are_found_without_the_rest() -> None:
    source = (
        "from hf_zero.layout import (  # both\n    a,\n    b,\n)\nx = 1\ndef f():\n    import hf_zero.x as y  # z\n"
    )
    assert ast.unparse(imports_alone(source)) == "from hf_zero.layout import a, b\nimport hf_zero.x as y"
