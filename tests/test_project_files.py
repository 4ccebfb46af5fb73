"""Files around the package: versions agree, workflows use existing targets, hooks fetch nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import hf_zero
from tests.versions.sets import BY_NAME, OLDEST_PYTHON

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def strings(value: Any) -> list[str]:
    if isinstance(value, (dict, list)):
        return [text for part in (value.values() if isinstance(value, dict) else value) for text in strings(part)]
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("path", sorted(GITHUB.glob("workflows/*.yml")), ids=lambda path: path.name)
def test_workflows_run_targets_and_sets_that_exist(path: Path) -> None:
    for job in load(path)["jobs"].values():
        commands = [step["run"].split() for step in job["steps"] if "run" in step]
        assert commands and all(words[0] == "make" and words[1] in TARGETS for words in commands)
        if "strategy" not in job:
            continue
        matrix = job["strategy"]["matrix"]
        pythons = [entry["python"] for entry in matrix["include"]] if "include" in matrix else matrix["python"]
        assert min(pythons, key=lambda version: int(version.partition(".")[2])) == OLDEST_PYTHON
        assert {entry["set"] for entry in matrix.get("include", ())} <= BY_NAME.keys()


@pytest.mark.parametrize("path", sorted(GITHUB.glob("workflows/*.yml")), ids=lambda path: path.name)
def test_workflows_use_actions_by_the_digest_of_their_code(path: Path) -> None:
    """A tag can be moved to other code."""
    used = [step["uses"] for job in load(path)["jobs"].values() for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", action) for action in used)


def test_continuous_integration_runs_targets_that_exist() -> None:
    words = re.findall(r"\bmake ([\w-]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert words == ["check", "test"] and set(words) <= TARGETS


def test_hooks_are_local() -> None:
    repositories = load(ROOT / ".pre-commit-config.yaml")["repos"]
    assert {repository["repo"] for repository in repositories} == {"local"}
    hooks = [hook for repository in repositories for hook in repository["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"} and {hook["id"] for hook in hooks} == {"ruff", "mypy"}


def test_a_bug_comes_with_a_report_of_its_machine() -> None:
    fields = {field["id"]: field for field in load(GITHUB / "ISSUE_TEMPLATE" / "bug.yml")["body"]}
    assert fields["report"]["attributes"]["label"] == "python -m hf_zero report"
    assert fields["report"]["validations"]["required"] is True
    assert "python -m hf_zero report" in (GITHUB / "pull_request_template.md").read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert citation["version"] == hf_zero.__version__ and citation["license"] == "Apache-2.0"
    assert hf_zero.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_paths_and_links_of_pages_at_the_top_exist(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for path in re.findall(r"`(hf_zero/[\w/]+\.py)`", text) + re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / path).exists(), f"{name} names {path}"


def test_one_statement_gives_every_file_its_license() -> None:
    """REUSE.toml instead of a line in each file; its identifier names the license text LICENSE."""
    tomllib = pytest.importorskip("tomllib")
    (annotation,) = tomllib.loads((ROOT / "REUSE.toml").read_text(encoding="utf-8"))["annotations"]
    assert annotation["path"] == "**" and annotation["SPDX-FileCopyrightText"] == "The hf_zero authors"
    text = ROOT / "LICENSES" / f"{annotation['SPDX-License-Identifier']}.txt"
    assert text.read_text(encoding="utf-8") == (ROOT / "LICENSE").read_text(encoding="utf-8")
