"""The allowed versions in setup.cfg, the tested ones and the documented ones are the same."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.versions.sets import (
    BY_NAME,
    CHOSEN,
    HOSTS,
    OLDEST_PYTHON,
    ROOT,
    SETS,
    VersionSet,
    floors,
    pinned,
    requirements,
)


def test_every_host_library_has_one_floor() -> None:
    stated = requirements()
    assert {library: len(stated[library]) for library in HOSTS} == dict.fromkeys(HOSTS, 1)
    assert all(floors().values())


def test_the_oldest_set_is_every_floor() -> None:
    assert set(BY_NAME["oldest"].at_floor) == set(HOSTS)
    assert pinned(BY_NAME["oldest"]) == [f"{library}=={floor}" for library, floor in floors().items()]
    assert f"python_requires = >= {OLDEST_PYTHON}\n" in (ROOT / "setup.cfg").read_text(encoding="utf-8")
    assert BY_NAME["oldest"].python == OLDEST_PYTHON


@pytest.mark.parametrize("versions", SETS, ids=lambda versions: versions.name)
def test_no_set_lies_below_a_floor(versions: VersionSet) -> None:
    lowest = floors()
    for pin in map(Requirement, pinned(versions)):
        (specifier,) = pin.specifier
        assert Version(specifier.version) >= Version(lowest[pin.name])


def test_this_environment_lies_above_the_floors() -> None:
    """pip ensures it; if libraries are shared, the imported one must be the one that pip installed."""
    for library, floor in floors().items():
        try:
            installed = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue  # peft and trl are extras
        assert Version(installed) >= Version(floor), library
        imported = Version(importlib.import_module(library).__version__)
        assert imported.public == Version(installed).public, library


def test_the_chosen_tests_are_there() -> None:
    assert [path for path in CHOSEN if not (ROOT / path).exists()] == []


def test_the_page_names_the_floors() -> None:
    page = (ROOT / "docs" / "versions.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \|", page, flags=re.MULTILINE))
    assert rows == {"Python": OLDEST_PYTHON, **floors()}
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert ", ".join(f"{library} {floor}" for library, floor in floors().items()) in readme
    assert all(f"`{versions.name}`" in page for versions in SETS if not versions.name.startswith("python"))
