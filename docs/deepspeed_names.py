"""Writes docs/deepspeed_names.md: for every public name of DeepSpeed's engine and optimizers, what hf_zero has for it.

`python docs/deepspeed_names.py` writes the page, `--check` fails when it is not up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

import hf_zero
from hf_zero.api.engine_surface import SURFACE as ENGINE
from hf_zero.api.optimizer_surface import SURFACE as OPTIMIZER
from hf_zero.surface import Surface

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_suffix(".md")
TABLE = ROOT / "tests" / "integration" / "data" / "deepspeed_surfaces.json"
STAGES = (0, 1, 3)

HEAD = """# DeepSpeed's names on engine and optimizer

Written by `python docs/deepspeed_names.py` from the code and the names of DeepSpeed 0.19.8; do not edit.

*There* means: part of the engine or optimizer itself. *Thin* means: the answer is computed from what is there, when the
name is used. *Refused* means: `hasattr` is false, and using the name raises an AttributeError that says what to use
instead. Which modules and names can be imported is in [features.md](features.md).
"""


def engines() -> list[hf_zero.ZeroEngine]:
    """One engine per kind of stage; what one of them has, hf_zero has."""
    made = []
    for stage in STAGES:
        model = nn.Linear(2, 2)
        config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}}
        made.append(hf_zero.initialize(model=model, config=config, optimizer=torch.optim.AdamW(model.parameters()))[0])
    return made


def verdict(name: str, things: Sequence[object], surface: Surface) -> tuple[str, str]:
    """(verdict, what to know about it)."""
    if name in surface and name not in surface.parts:
        function = surface.values.get(name) or surface.methods[name]
        return "thin", (function.__doc__ or "").partition("\n")[0]
    if name in surface.refused:
        return "refused", f"instead: {surface.refused[name]}"
    if name == "parameter_offload" or any(hasattr(thing, name) for thing in things):
        return "there", "with sharded parameters" if name == "parameter_offload" else ""
    raise SystemExit(f"{name}: neither there, nor thin, nor refused: give it a place in a surface")


def sections(names: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[str]:
    made = engines()
    for title, kinds in names.items():
        is_engine = title == "DeepSpeedEngine"
        things = made if is_engine else [engine.optimizer for engine in made]
        surface = ENGINE if is_engine else OPTIMIZER
        rows = [(name, kind[:-1], *verdict(name, things, surface)) for kind in kinds for name in kinds[kind]]
        counts = [sum(row[2] == word for row in rows) for word in ("there", "thin", "refused")]
        yield f"## {title}\n\n{len(rows)} names: {counts[0]} there, {counts[1]} thin, {counts[2]} refused.\n"
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
