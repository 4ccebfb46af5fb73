"""The wheel, built once, and environments in which it is tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.integration.sites import Site, copy_of_the_tree, pip


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Built once for all workers of xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "wheel"
    with FileLock(f"{folder}.lock"):
        if not list(folder.glob("*.whl")):
            folder.mkdir(exist_ok=True)
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


@pytest.fixture
def clean_libraries() -> Iterator[None]:
    """Neither finds nor leaves a test's state in the libraries' globals."""
    from tests.integration.flows import clean  # local, because other tests do not need these libraries

    clean()
    yield
    clean()


@pytest.fixture
def one_rank(clean_libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launched job of one rank."""
    launched = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
