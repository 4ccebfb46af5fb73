"""The reference of an attacked training: the same script without attacks, on ranks that start at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from bench import chaos_script
from tests.support.ranks import run_ranks

Line = dict[str, Any]


def _run_script(rank: int, words: list[str]) -> None:
    with mock.patch.object(sys, "argv", ["chaos_script", *words]):
        chaos_script.main()


def undisturbed_lines(folder: Path, config: dict[str, Any], updates: int, world: int = 2) -> list[Line]:
    """Loss and norm of every update on `world` ranks of one host, without checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {key: value for key, value in config.get("hf_zero", {}).items() if key != "resilience"}
    (folder / "ds.json").write_text(json.dumps({**config, "hf_zero": own}))
    words = [str(folder / "lines"), str(folder / "ds.json"), str(updates)]
    run_ranks(_run_script, world, words, init=False)
    lines = [json.loads(line) for line in (folder / "lines").read_text().splitlines()]
    assert [line["update"] for line in lines] == list(range(1, updates + 1))
    return lines
