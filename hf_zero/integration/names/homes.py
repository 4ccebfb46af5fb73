"""Where hf_zero keeps what DeepSpeed's modules offer: module -> name -> dotted home. Nothing of it is imported yet.

homes.json has rows `"module": {"home below hf_zero": "name name theirs=ours"}`. A name is listed once, at the module
that defines it in DeepSpeed; names.json says which modules import it from there (but for utils.z3_leaf_module, which
has a function of that very name). Names that are only in DeepSpeed's modules refuse to be used: see unsupported.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path

Homes = dict[str, str]
# Modules that are others of the package, or of ours, under a second name.
SAME_MODULE = {
    "checkpointing": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "dist": "deepspeed.comm",
    "utils.groups": "hf_zero.integration.compat.groups",
    "zero": "deepspeed.runtime.zero",
}
_BUILDERS = "ops.op_builder"  # every module below it has all builders


@functools.cache
def all_homes() -> Mapping[str, Homes]:
    """homes.json, and that of every extra that is there, by module path without `deepspeed.`."""
    here = Path(__file__)
    found: dict[str, Homes] = {}
    for path in (here.with_name("homes.json"), *sorted(here.parents[2].glob("extras/*/homes.json"))):
        for module, row in json.loads(path.read_text(encoding="utf-8")).items():
            found.setdefault(module, {}).update(_entries(row))
    return found


def _entries(row: Mapping[str, str]) -> list[tuple[str, str]]:
    pairs = [(home, *name.partition("=")) for home, names in row.items() for name in names.split()]
    return [(theirs, f"hf_zero.{home}.{ours or theirs}") for home, theirs, _, ours in pairs]


def homes_of(module: str) -> Homes:
    """The names of ours in DeepSpeed's `module` (without `deepspeed.`)."""
    return all_homes().get(_BUILDERS if f"{module}.".startswith(f"{_BUILDERS}.") else module, {})
