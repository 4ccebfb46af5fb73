"""The pages: every error has an entry, links lead somewhere, sections of ds.json on them resolve, names exist."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hf_zero.config import resolve

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Raised and caught inside the package, or for tests.
INTERNAL = {"ElasticProblem", "Gone", "LateError", "Misfit", "NotAlike", "_Enough", "_Passed"}
# Pages that are made when the site is built.
MADE = {"contributing.md", "measured.md"}


def errors() -> set[str]:
    """Names of the package's exception classes, by their bases."""
    bases: dict[str, set[str]] = {}
    for path in (ROOT / "hf_zero").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    found = {"Exception", "ValueError", "RuntimeError", "AssertionError", "TypeError", "NotImplementedError"}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found & bases.keys()


def test_every_error_has_an_entry_in_troubleshooting() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    entries = set(re.findall(r"^## (\w+)$", page, flags=re.MULTILINE))
    missing = errors() - INTERNAL - entries
    assert not missing, f"docs/troubleshooting.md has no heading for {sorted(missing)}"


def anchors(path: Path) -> set[str]:
    """Of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        path = (page.parent / target) if target else page
        assert path.exists(), f"{page.name} leads to {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name} leads to {target}#{anchor}"


def test_every_page_is_on_the_site() -> None:
    nav = set(re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]))
    assert nav == {path.name for path in (ROOT / "docs").glob("*.md")} | MADE


def sections() -> Iterator[tuple[str, dict[str, Any]]]:
    """(page, section of ds.json) of every block that is one."""
    for page in PAGES:
        blocks = re.findall(r"```json\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for block in blocks:
            if '"architectures"' in block:
                continue  # a model's
            text = block.strip()
            yield page.name, json.loads(text if text.startswith("{") else f"{{{text}}}")


@pytest.mark.parametrize(("page", "section"), [*sections()], ids=lambda value: value if isinstance(value, str) else "")
def test_sections_on_pages_resolve(page: str, section: dict[str, Any], tmp_path: Path) -> None:
    """As they stand, with a batch size where none follows from them."""
    text = json.dumps(section).replace("/mnt/nvme", str(tmp_path))
    config = json.loads(text)
    if "elasticity" not in config:
        config.setdefault("train_micro_batch_size_per_gpu", 1)
    resolved = resolve(config, world_size=8)
    assert resolved.batch.train_batch_size * resolved.tensor_size >= 8
