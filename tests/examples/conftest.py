"""Fixtures for the examples: their folder on the path, and a small fixed text."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# The examples are scripts that import each other as siblings, not a package.
sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """Twelve documents of simple code, about 20 kB."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(12):
        lines = [
            f"def f{number}_{k}(value):\n    total = value + {k}\n    return total * {number}\n\n" for k in range(24)
        ]
        (folder / f"part{number:02d}.py").write_text("".join(lines))
    return folder


@pytest.fixture(autouse=True)
def _caches_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps tests out of the user's own cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    datasets.disable_progress_bars()
