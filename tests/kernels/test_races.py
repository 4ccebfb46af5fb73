"""No data races between the programs of a kernel, and no access outside the kernel's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.kernels.test_compilation import kernels
from tests.support.compilation import Launch
from tests.support.races import launches_watched
from tests.support.requirements import requires

pytestmark = [
    requires(modules=("triton",)),
    pytest.mark.lengthy,
    pytest.mark.skipif(torch.cuda.is_available(), reason="Triton does not interpret here"),
]


def examine(launches: Sequence[Launch]) -> None:
    with launches_watched(seed=3) as found:
        for launch in launches:
            launch.call()
    assert set(found) == {name.rpartition(".")[2] for name in kernels()}
    assert {kernel: wrong for kernel, wrong in found.items() if wrong} == {}


def test_no_program_is_in_the_way_of_another() -> None:
    """On vectors that begin and end anywhere, where a program could exceed its part; the slow test has all."""
    from tests.kernels.launches import ANYWHERE

    examine(ANYWHERE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_program_is_in_the_way_of_another_with_any_options() -> None:
    from tests.kernels.launches import ALL, ANYWHERE, QUICK

    examine([*QUICK, *ANYWHERE, *ALL])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("is_right", []),
        ("writes_what_another_writes", ["programs 0 and 1 write target, byte 256"]),
        ("reads_what_another_writes", ["program 0 reads what program 1 writes: target, byte 256"]),
        ("reads_outside", ["program 2: element 130 of source, which has none there, is read"]),
        ("writes_outside", ["program 2: element 130 of target, which has none there, is written"]),
        ("numbers_as_they_come", ["target depends on the order of programs"]),
    ],
)
def test_faults_are_found(name: str, said: list[str]) -> None:
    from tests.kernels import racing_kernels

    numel = 2 * racing_kernels.BLOCK + 2
    source, target = (torch.zeros(numel + 10)[:numel] for _ in range(2))
    kernel: Any = getattr(racing_kernels, name)
    with launches_watched(seed=3) as found:
        kernel[(3,)](source, target, numel, BLOCK=racing_kernels.BLOCK)
    assert found == {name: said}
