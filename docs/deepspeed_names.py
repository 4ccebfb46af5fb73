"""Writes docs/deepspeed_names.md: for every public name of DeepSpeed's engine and optimizers, what hf_zero has for it.

`python docs/deepspeed_names.py` writes the page, `--check` fails when it is not up to date.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hf_zero.api.engine import ZeroEngine
from hf_zero.integration.engine.engine import DeepSpeedEngine
from hf_zero.integration.engine.instead import ENGINE, OPTIMIZER
from hf_zero.integration.engine.optimizer import DeepSpeedOptimizer
from hf_zero.step.optimizer import ZeroOptimizer

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_suffix(".md")
TABLE = ROOT / "tests" / "integration" / "data" / "deepspeed_surfaces.json"

HEAD = """# DeepSpeed's names on engine and optimizer

Written by `python docs/deepspeed_names.py` from the classes and the names of DeepSpeed 0.19.8; do not edit.

*Own* means: part of hf_zero's own engine or optimizer. *Added* means: a method or attribute that DeepSpeed's class has
in addition, in `hf_zero.integration.engine`. *Missing* means: `hasattr` is false, and using the name raises an
AttributeError that says what to use instead. Which modules and names can be imported is in [features.md](features.md).
"""


def verdict(name: str, kind: type, own: type, instead: Mapping[str, str]) -> tuple[str, str]:
    """(verdict, what to know about it)."""
    for names, answer in instead.items():
        if name in names.split():
            return "missing", f"instead: {answer}"
    if hasattr(kind, name) and not hasattr(own, name):
        found = inspect.getattr_static(kind, name)
        return "added", " ".join((found.__doc__ or "").partition("\n\n")[0].split())
    if hasattr(own, name) or name in own.__doc__ + inspect.getsource(own.__init__):
        return "own", "with sharded parameters" if name == "parameter_offload" else ""
    raise SystemExit(f"{name}: neither there nor missing: add it to a class, or to hf_zero.integration.engine.instead")


def sections(names: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[str]:
    for title, kinds in names.items():
        is_engine = title == "DeepSpeedEngine"
        classes = (DeepSpeedEngine, ZeroEngine, ENGINE) if is_engine else (DeepSpeedOptimizer, ZeroOptimizer, OPTIMIZER)
        rows = [(name, kind[:-1], *verdict(name, *classes)) for kind in kinds for name in kinds[kind]]
        counts = [sum(row[2] == word for row in rows) for word in ("own", "added", "missing")]
        yield f"## {title}\n\n{len(rows)} names: {counts[0]} own, {counts[1]} added, {counts[2]} missing.\n"
        lines = (f"| `{name}` | {kind} | {word} | {note} |" for name, kind, word, note in sorted(rows))
        yield "| name | kind | verdict | |\n|---|---|---|---|\n" + "\n".join(lines) + "\n"


def page() -> str:
    names = json.loads(TABLE.read_text(encoding="utf-8"))
    return "\n".join([HEAD, *sections(names)])


def main(words: Sequence[str]) -> int:
    text = page()
    if "--check" in words:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
