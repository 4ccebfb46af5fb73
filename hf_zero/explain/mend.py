"""`explain --fix`: the config with every problem fixed that its author need not decide."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_zero.config import ConfigDict, ConfigError, Findings, Problem, Views, examine
from hf_zero.config.errors import ABSENT, Edit, Remark

_ROUNDS = 5  # a key that was renamed may be wrong under its right name, too


def mend(config: ConfigDict, views: Views, *, ranks_known: bool = True) -> tuple[dict[str, Any], list[str]]:
    """A mended copy of the config as plain dicts, and a line for every change.

    Args:
        ranks_known: False: the number of ranks has not been given, so that batch sizes which do not go
            together here may be right there.
    """
    mended: dict[str, Any] = copy.deepcopy(dict(config))
    changes: list[str] = []
    for _ in range(_ROUNDS):
        edits = [
            edit
            for edit in _edits(examine(mended, views, complete=False))
            if ranks_known or edit.path != ("train_batch_size",) or edit.to
        ]
        done = [str(edit) for edit in edits if _apply(mended, edit)]
        changes += done
        if not done:
            break
    return mended, changes


def _edits(findings: Findings) -> Iterator[Edit]:
    """Once per place: a key that is wrong for two reasons is changed for the first. What changes nothing may stay."""
    seen = set()
    found: list[Problem | Remark] = [*findings.problems, *findings.remarks]
    for finding in found:
        edit = finding.edit
        if edit is None or edit.path in seen:
            continue
        if not isinstance(finding, Remark) or finding.ignored or edit.to or edit.value is not ABSENT:
            seen.add(edit.path)
            yield edit


def _apply(config: dict[str, Any], edit: Edit) -> bool:
    """Carry out an edit; False where its place is not there or the new one is taken."""
    holder = _holder(config, edit.path)
    if holder is None or edit.path[-1] not in holder:
        return False
    if not edit.to:
        if edit.value is ABSENT:
            del holder[edit.path[-1]]
        else:
            holder[edit.path[-1]] = edit.value
        return True
    target = _holder(config, edit.to, make=True)
    if target is None or target.get(edit.to[-1]) is not None:
        return False
    written = holder.pop(edit.path[-1])
    target[edit.to[-1]] = written if edit.value is ABSENT else edit.value
    return True


def _holder(config: dict[str, Any], path: tuple[str, ...], *, make: bool = False) -> dict[str, Any] | None:
    holder = config
    for key in path[:-1]:
        inner = holder.setdefault(key, {}) if make else holder.get(key)
        if not isinstance(inner, dict):
            return None
        holder = inner
    return holder


def write_mended(config: dict[str, Any], target: Path) -> None:
    """The file; an existing one is never overwritten.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=4) + "\n")
    except FileExistsError:
        raise ConfigError(Problem("--fix", str(target), "there is such a file", "name another, or remove it")) from None
    except OSError as error:
        rule = f"it cannot be written: {error.strerror}"
        raise ConfigError(Problem("--fix", str(target), rule, "name another")) from None


def default_target(name: str) -> Path:
    """ds.json -> ds.fixed.json beside it; a config that came as text goes to the working directory."""
    path = Path(name or "ds.json")
    return path.with_name(f"{path.stem}.fixed.json")
