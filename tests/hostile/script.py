"""A hostile program as one Python file that needs only hf_zero and torch, for bug reports.

The file contains the very code that the tests run (spec, model, body, oracle), so it behaves the same.
"""

from __future__ import annotations

import ast
import inspect
from types import ModuleType

from tests.hostile import body, model, oracle, spec
from tests.hostile.spec import Call, Forward, ModuleSpec, Program
from tests.support import as_json

PARTS: tuple[ModuleType, ...] = (as_json, spec, model, body, oracle)
HANG_S = 60

_HEAD = '''"""Hostile program {seed}: {kind}.

    torchrun --nproc-per-node {world} {name}

{description}
"""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
'''

_TAIL = '''

PROGRAM = r"""
{json}
"""


def main() -> None:
    faulthandler.dump_traceback_later({hang_s}, exit=True)  # where it hangs
    torch.set_num_threads(1)
    rank, program = int(os.environ["RANK"]), Program.from_json(PROGRAM)
    result = run_rank(program, rank, make_zero_engine, tempfile.mkdtemp())
    difference = _difference(rank, result, expected(program)[rank])
    print(difference or f"rank {{rank}} is right", flush=True)
    faulthandler.cancel_dump_traceback_later()
    sys.exit(difference is not None)


if __name__ == "__main__":
    main()
'''


def script_of(program: Program, kind: str, name: str = "script.py") -> str:
    """The text of a script that exits with 0 if its ranks agree with one process."""
    description = describe(program).replace("\n", "\n    ")
    head = _HEAD.format(
        seed=program.seed, kind=kind, world=program.world, name=name, description=f"    {description}".rstrip()
    )
    parts = "".join(without_imports_of_ours(part) for part in PARTS)
    return head + parts + _TAIL.format(json=program.to_json(indent=1), hang_s=HANG_S)


def without_imports_of_ours(module: ModuleType) -> str:
    """The source of `module` without its docstring and without imports that the other parts or the head provide."""
    source = inspect.getsource(module)
    lines = source.splitlines(keepends=True)
    tree = ast.parse(source)
    for node in tree.body:
        is_docstring = node is tree.body[0] and isinstance(node, ast.Expr)
        ours = isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("tests", "__future__")
        if is_docstring or ours:
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return f"\n# {module.__name__.rpartition('.')[2]}\n{''.join(lines).rstrip()}\n"


def describe(program: Program) -> str:
    """A readable description of a program."""
    settings = f"stage {program.stage}, {program.world} ranks, {program.optimizer}, width {program.width}"
    extras = {
        "offload": program.offload if program.offload != "none" else "",
        "clip": program.clip,
        "reduce_bucket": program.reduce_bucket,
        "limits": program.limits if program.stage == 3 else "",
        "frozen": program.frozen,
        "ties": program.ties,
        "leaves": program.leaves,
        "own parameters": program.shapes,
    }
    lines = [settings, *(f"{name}: {value}" for name, value in extras.items() if value)]
    lines += ["modules:", *_tree(program.modules, "  ")]
    for number, step in enumerate(program.steps):
        for index, micro in enumerate(step):
            lines.append(f"step {number}, micro-batch {index}, backward: {micro.backward}")
            for rank, part in enumerate(micro.ranks):
                forwards = " ; ".join(_batch(forward) for forward in part.forwards)
                evaluations = " ; ".join(_batch(forward) for forward in part.evaluations)
                more = f"   evaluates {part.evaluate}: {evaluations}" if evaluations else ""
                lines.append(f"  rank {rank}: {forwards}{more}")
    return "\n".join(lines)


def _tree(specs: tuple[ModuleSpec, ...], indent: str) -> list[str]:
    lines = []
    for one in specs:
        target = f" of {one.target}" if one.target else ""
        shapes = f" {list(one.shapes)}" if one.shapes else ""
        output = f" -> {one.output}" if one.output != "tensor" else ""
        lines.append(f"{indent}{one.name}: {one.kind}{target} ({one.size}){shapes}{output}")
        lines += _tree(one.children, indent + "  ")
    return lines


def _batch(forward: Forward) -> str:
    return ("directly " if forward.direct else "") + "[" + ", ".join(_call(call) for call in forward.calls) + "]"


def _call(call: Call) -> str:
    words = [word for word in (call.checkpoint, call.mode if call.mode != "live" else "") if word]
    words += ["of the input"] if call.source == "input" else []
    words += ["tapped"] if call.tap else []
    around = f" ({', '.join(words)})" if words else ""
    return call.path + ("[" + ", ".join(_call(inner) for inner in call.inner) + "]" if call.inner else "") + around
