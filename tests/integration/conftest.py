"""The wheel, built once, and the environments it is tried in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.sites import Site, copy_of_the_tree, pip


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(copy_of_the_tree(folder)))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """hf_zero and nothing else: not even torch."""
    return Site.empty(tmp_path_factory.mktemp("bare")).unpack(wheel)


@pytest.fixture(scope="session")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """hf_zero with torch, transformers and accelerate."""
    return Site.empty(tmp_path_factory.mktemp("full")).unpack(wheel).borrow_libraries()


@pytest.fixture(scope="session")
def beside_real(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """hf_zero next to an installed (imitated) real DeepSpeed."""
    return Site.empty(tmp_path_factory.mktemp("beside")).unpack(wheel).add_real_deepspeed()
