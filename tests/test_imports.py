"""The architecture as rules for the sources: imports go to lower layers, and a few things have one place."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hf_zero"

# Low to high. A package imports from lower layers and from itself; packages in one layer do not import each other.
LAYERS = (
    (
        *("errors", "log", "rank_environment", "network", "deepspeed_version", "features", "spans"),
        *("quantities", "staging"),
    ),
    ("kernels", "config"),
    ("layout", "device"),
    ("comm",),
    ("precision", "schedules"),
    ("offload",),
    ("optim",),
    ("params",),
    ("grads",),
    ("step",),
    (
        *("checkpoint", "profiling"),
        *("sequence", "tensor", "tiling", "activations"),
    ),
    ("api",),
    ("integration",),
    ("explain", "report"),
    ("planning",),
    ("launch",),
    ("extras",),
    ("ds_to_universal", "pages", "zero_to_fp32"),
    ("__main__",),
)
LAYER_OF = {package: height for height, packages in enumerate(LAYERS) for package in packages}
SELF_CONTAINED = {*LAYERS[0], *LAYERS[1]}
# All other packages query device/ for the accelerator and its capabilities.
PACKAGES_THAT_KNOW_CUDA = ("hf_zero.device.", "hf_zero.kernels.gpu.")
_DEEPSPEEDS_WORD = "a word of DeepSpeed's interface"
MAY_NAME_CUDA = {
    "hf_zero.config.schema.root": "names CUDA graphs, in a text",
    "hf_zero.integration.compat.accelerator": "DeepSpeed's accelerator, which answers for each kind",
    "hf_zero.integration.compat.activation_checkpointing": _DEEPSPEEDS_WORD,
    "hf_zero.report.environment": "reports how torch was built",
    "hf_zero.integration.compat.utils": _DEEPSPEEDS_WORD,
    "hf_zero.launch.world": "the variable is NVIDIA's",
    "hf_zero.extras.resilience.restarts": "PyTorch's variable for programs that fork",
    "hf_zero.extras.one_bit": _DEEPSPEEDS_WORD,
    "hf_zero.extras.one_bit.compressing": _DEEPSPEEDS_WORD,
    "hf_zero.params.stand_ins": "lists the conversions of a tensor",
}
# All other modules get the groups of an engine: the process' rank is wrong as soon as states are sharded over fewer
# ranks than all.
MAY_ASK_THE_PROCESS = ("hf_zero.api.entry", "hf_zero.integration.", "hf_zero.sequence.groups", "hf_zero.tensor.groups")
LIVE_AT_START = {"hf_zero", "hf_zero.integration", "hf_zero.integration.startup"}


@dataclass(frozen=True)
class Import:
    module: str
    line: int
    at_top: bool


@functools.cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes; walking a tree takes longer than most rules do."""
    return tuple(ast.walk(tree))


def imports_of(tree: ast.Module, nodes: Iterable[ast.AST] | None = None) -> Iterator[Import]:
    """Every module a source imports; `from a import b` counts as `a.b`, which covers both of its meanings."""
    top = {id(node) for node in tree.body}
    for node in nodes_of(tree) if nodes is None else nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import (absolute ones say which package is meant)"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield Import(name, node.lineno, id(node) in top)


def package_of(module: str) -> str | None:
    """`hf_zero.step.optimizer` -> `step`; None for foreign modules; the package root is ''."""
    parts = module.split(".")
    if parts[0] != PACKAGE:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LAYER_OF else ""


def extra_of(module: str) -> str:
    """`hf_zero.extras.compression.clean` -> `compression`."""
    return ".".join(module.split(".")[2:3])


def complaints(module: str, tree: ast.Module) -> list[str]:
    """All violations in one source file of the package."""
    found = [*_upward(module, tree), *_misplaced(module, tree), *_forbidden_statements(tree), *_asking(module, tree)]
    return [f"{module}: {text}" for text in found]


def _upward(module: str, tree: ast.Module) -> Iterator[str]:
    here = package_of(module)
    if here == "":
        return  # the package root is above every layer; LIVE_AT_START guards what it loads
    assert here is not None
    for imported in imports_of(tree):
        there = package_of(imported.module)
        if there is None or there == here:
            if here == "extras" and extra_of(imported.module) not in ("", extra_of(module)) and there == here:
                yield f"line {imported.line} imports another extra ({imported.module})"
            continue
        if there == "":
            yield f"line {imported.line} imports the package root ({imported.module})"
        elif here in SELF_CONTAINED:
            yield f"line {imported.line} imports {imported.module}, but {here} imports nothing of ours"
        elif there == "extras":
            yield f"line {imported.line} imports {imported.module}: extras are found by hf_zero.config.extras"
        elif LAYER_OF[there] >= LAYER_OF[here]:
            yield f"line {imported.line} imports upward: {here} -> {imported.module}"


def _misplaced(module: str, tree: ast.Module) -> Iterator[str]:
    here = package_of(module)
    for imported in imports_of(tree):
        top = imported.module.split(".")[0]
        if top == "deepspeed":
            yield f"line {imported.line} imports a real deepspeed"
        if top == "torch" and here == "config":
            yield f"line {imported.line} imports torch inside config"
        if imported.module.startswith("torch.distributed") and here != "comm":
            yield f"line {imported.line} imports torch.distributed outside comm"
        if module in LIVE_AT_START and imported.at_top and top not in {"__future__", "os", "sys", PACKAGE}:
            yield f"line {imported.line} imports {top} at interpreter start"
    for node in nodes_of(tree) if here != "comm" else ():
        if isinstance(node, ast.Attribute) and node.attr == "distributed" and _is_name(node.value, "torch"):
            yield f"line {node.lineno} uses torch.distributed outside comm"


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _asking(module: str, tree: ast.Module) -> Iterator[str]:
    """Names by which a process queries its rank or the world size."""
    if package_of(module) == "comm":
        return
    forbidden = {"get_rank", "get_world_size"}
    if not module.startswith(MAY_ASK_THE_PROCESS):
        forbidden.add("this_process")
    for node in nodes_of(tree):
        names = {value for value in vars(node).values() if isinstance(value, str)}
        for name in sorted(names & forbidden):
            yield f"line {getattr(node, 'lineno', 0)} asks for {name}: the rank and the size are those of a group"


def _forbidden_statements(tree: ast.Module) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno} uses global"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"line {node.lineno} prints (log instead)"


def names_cuda(tree: ast.Module) -> list[int]:
    """Lines whose code contains cuda, in a name or a string; comments and docstrings do not count."""
    statements = [node.value for node in nodes_of(tree) if isinstance(node, ast.Expr)]
    texts = {id(value) for value in statements if isinstance(value, ast.Constant)}
    found = []
    for node in nodes_of(tree):
        said = [value for value in vars(node).values() if isinstance(value, str)] if id(node) not in texts else []
        if any("cuda" in text.lower() for text in said):
            found.append(getattr(node, "lineno", 0))
    return found


@functools.cache
def sources() -> dict[str, Path]:
    """module -> file, of the whole package."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    parts = {path: path.relative_to(ROOT).with_suffix("").parts for path in files}
    return {".".join(p[:-1] if p[-1] == "__init__" else p): path for path, p in parts.items()}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """module -> syntax tree."""
    return {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in sources().items()}


def test_imports_go_to_lower_layers() -> None:
    assert [text for module, tree in trees().items() for text in complaints(module, tree)] == []


def test_one_package_knows_the_accelerator() -> None:
    found = {
        module: lines
        for module, tree in trees().items()
        if (lines := names_cuda(tree)) and not module.startswith(PACKAGES_THAT_KNOW_CUDA)
    }
    assert {module: lines for module, lines in found.items() if module not in MAY_NAME_CUDA} == {}, "ask device/"
    assert [module for module in MAY_NAME_CUDA if module not in found] == [], "no exceptions any more"


@pytest.mark.parametrize("source", ["x.is_cuda", "f(cuda=1)", "import torch.cuda", 'y = "cuda:0"', "def cuda(): ..."])
def test_naming_cuda_is_found(source: str) -> None:
    assert names_cuda(ast.parse(source)) and not names_cuda(ast.parse('"""CUDA."""  # cuda'))


def without_types(tree: ast.Module) -> Iterator[ast.AST]:
    """All nodes except those only for type checkers, which are not imported at run time."""
    unread = {
        id(node)
        for choice in nodes_of(tree)
        if isinstance(choice, ast.If) and _is_name(choice.test, "TYPE_CHECKING")
        for statement in choice.body
        for node in ast.walk(statement)
    }
    return (node for node in nodes_of(tree) if id(node) not in unread)


def known_imports(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """module -> those of `modules` that it imports, at the top level or inside a function."""
    found: dict[str, set[str]] = {}
    for module, tree in modules.items():
        named = {imported.module for imported in imports_of(tree, without_types(tree))}
        # In `from a import b`, `a.b` may be a name in `a`.
        meant = {name if name in modules else name.rpartition(".")[0] for name in named}
        found[module] = (meant & modules.keys()) - {module}
    return found


def in_rings(imports: dict[str, set[str]]) -> set[str]:
    """The modules that are part of an import cycle."""
    found = set()
    for module in imports:
        reached: set[str] = set()
        waiting = [*imports[module]]
        while waiting:
            following = waiting.pop()
            if following not in reached:
                reached.add(following)
                waiting += imports[following]
        if module in reached:
            found.add(module)
    return found


def test_imports_inside_functions_close_no_ring() -> None:
    rings = sorted(in_rings(known_imports(trees())))
    assert rings == [], "these lead back to themselves: move what both need into a third module"


def test_rings_are_found() -> None:
    modules = {
        "hf_zero.a": "def f():\n    from hf_zero.b import g",
        "hf_zero.b": "from hf_zero import c",
        "hf_zero.c": "import hf_zero.a",
        "hf_zero.d": "import hf_zero.a",
    }
    trees = {module: ast.parse(source) for module, source in modules.items()}
    assert in_rings(known_imports(trees)) == {"hf_zero.a", "hf_zero.b", "hf_zero.c"}


def test_every_package_has_a_layer() -> None:
    packages = {module.split(".")[1] for module in sources() if "." in module}
    assert packages <= set(LAYER_OF), f"give {sorted(packages - set(LAYER_OF))} a place in LAYERS"


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        (
            "hf_zero.step.state",
            "from hf_zero.api.engine import ZeroEngine",
            "imports upward: step -> hf_zero.api.engine",
        ),
        ("hf_zero.step.state", "def f():\n    import hf_zero.api.entry", "line 2 imports upward"),
        ("hf_zero.schedules", "from hf_zero.step import x", "imports upward"),
        ("hf_zero.kernels.adam", "import hf_zero.log", "kernels imports nothing of ours"),
        ("hf_zero.optim", "from hf_zero import initialize", "imports the package root"),
        ("hf_zero.optim", "import hf_zero", "imports the package root"),
        ("hf_zero.step", "import torch.distributed as dist", "imports torch.distributed outside comm"),
        ("hf_zero.step", "from torch import distributed", "imports torch.distributed outside comm"),
        ("hf_zero.step", "import torch\nx = torch.distributed.get_rank()", "line 2 uses torch.distributed"),
        ("hf_zero.step", "from hf_zero.comm import get_rank", "line 1 asks for get_rank"),
        ("hf_zero.checkpoint.save", "from hf_zero import comm\nx = comm.get_world_size()", "line 2 asks for get_world"),
        ("hf_zero.api.engine", "from hf_zero.comm import this_process", "asks for this_process"),
        ("hf_zero.config", "from torch import float16", "imports torch inside config"),
        ("hf_zero.explain.command", "from hf_zero.extras.one import x", "extras are found by hf_zero.config.extras"),
        ("hf_zero.__main__", "def f():\n    import hf_zero.extras.one", "extras are found by hf_zero.config.extras"),
        ("hf_zero.extras.one.a", "from hf_zero.extras.two.b import c", "imports another extra"),
        ("hf_zero.api.engine", "from deepspeed.comm import barrier", "imports a real deepspeed"),
        ("hf_zero.api.engine", "from hf_zero.integration.engine.view import View", "imports upward"),
        ("hf_zero.api.engine", "def f():\n    global x", "uses global"),
        ("hf_zero.api.engine", "print(1)", "prints"),
        ("hf_zero.integration.startup", "import typing", "imports typing at interpreter start"),
    ],
)
def test_the_rules_catch(module: str, source: str, complaint: str) -> None:
    assert any(complaint in text for text in complaints(module, ast.parse(source)))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hf_zero.api.engine", "from hf_zero.step import a\nfrom hf_zero.log import logger\nimport torch"),
        ("hf_zero.step.a", "from hf_zero.step.b import c"),
        ("hf_zero.extras.one.a", "from hf_zero.extras.one.b import c\nfrom hf_zero.launch import d"),
        ("hf_zero.comm.process_group", "import torch.distributed as dist"),
        ("hf_zero.integration.startup", "def f():\n    import importlib.util"),
    ],
)
def test_the_rules_allow(module: str, source: str) -> None:
    assert complaints(module, ast.parse(source)) == []


def test_the_engine_does_not_load_the_compiler() -> None:
    """A decorator (`torch.compiler.disable`) doubled the startup time of every rank."""
    code = "import sys, hf_zero; hf_zero.initialize; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_what_extras_declare_needs_no_torch() -> None:
    """Reading a config loads the extras that it requests, even if the process only starts ranks."""
    code = "import sys; from hf_zero.config.extras import installed; print(len(installed()), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    num, has_torch = done.stdout.split()
    declared = [path for path in (ROOT / PACKAGE / "extras").glob("*/__init__.py") if "EXTRA = " in path.read_text()]
    assert int(num) == len(declared) and has_torch == "False"
