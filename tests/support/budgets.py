"""Limits of registers, shared memory and barriers of compiled kernels; which kernels exceed them, and why.

An update is bound by memory, whose latency is only hidden by many concurrent warps: as many as a processor holds. At
that occupancy NVIDIA's have 32 registers per thread, AMD's 64. Access widths and bytes per element are in the kernels'
docstrings, which `machine_code.complaints` checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Protocol

# Triton's version. With 3.6 all but nine of 45 specialisations keep the budgets on compute capability 9.0, and all but
# six on gfx942: sums have one or two more barriers, and on the former updates with seeds 38 to 48 registers.
FIGURES_OF = "3.9."


@dataclass(frozen=True)
class Budget:
    """The maximum of each figure of `Compiled`; spills are never allowed."""

    registers: int
    shared_bytes: int = 0
    barriers: int = 0
    atomics: int = 0
    spilled_bytes: int = 0


class Figures(Protocol):
    """Figures to compare with a budget: tests.support.compilation.Compiled."""

    kernel: str
    signature: dict[str, str]
    is_aligned: bool
    registers: int
    shared_bytes: int
    barriers: int
    atomics: int
    spilled_bytes: int


ELEMENTWISE = {"cuda": Budget(32), "hip": Budget(64)}
# Unaligned vectors are processed element by element, each with its own address.
ANYWHERE = Budget(96, shared_bytes=8192, barriers=7)

_SUM = "adds its elements up, over warps"


@dataclass(frozen=True)
class Excess:
    """A kernel that exceeds its budget, its figures, and the reason."""

    why: str
    cuda: Budget
    hip: Budget


# Kernel -> its maximum costs. A figure that got worse fails; lower the entry here if it got better.
EXCESS = {
    "adam8._adam8": Excess(
        "a block's largest element is needed before its first code is stored, so eight elements of both states are "
        "there at once, in 64 to 72 registers: 44% of the warps, which is enough for what memory brings meanwhile",
        cuda=Budget(72),
        hip=Budget(48),
    ),
    "lamb._moments": Excess(_SUM, cuda=Budget(32, shared_bytes=32, barriers=3), hip=Budget(64, 16, 3)),
    "lamb._add_up": Excess(_SUM, cuda=Budget(32, 32, 4), hip=Budget(64, 32, 4)),
    "norm._squares": Excess(_SUM, cuda=Budget(32, 16, 1), hip=Budget(64, 16, 1)),
    "quantize._write": Excess(
        "the scales of its blocks go from the layout of rows to one vector; with feedback it quantizes twice, "
        "and needs what is left of the first time",
        cuda=Budget(60, 1024, 3),
        hip=Budget(64, 32, 3),
    ),
    "quantize._read": Excess(
        "two codes of a byte and their fp32 values are laid out differently over threads",
        cuda=Budget(32, 8192, 1),
        hip=Budget(64),
    ),
    "quantize._sum": Excess(
        "as quantize._read; the loop over parts is unrolled four times: 34 registers on compute capability 10.0, where "
        "75% of the warps are there",
        cuda=Budget(34, 8192, 1),
        hip=Budget(64),
    ),
    "signs._pack": Excess(
        "the bytes that eight signs make go from the layout of rows to one vector",
        cuda=Budget(32, 256, 1),
        hip=Budget(64, 256, 1),
    ),
    "signs._unpack": Excess(
        "bytes go from one vector to the layout of rows", cuda=Budget(32, 1024, 1), hip=Budget(64, 1024, 1)
    ),
}


def short(kernel: str) -> str:
    """`hf_zero.kernels.gpu.adam._adam` -> `adam._adam`."""
    return kernel.rpartition("gpu.")[2]


def budget_of(figures: Figures, backend: str) -> Budget:
    found = EXCESS.get(short(figures.kernel))
    if not figures.is_aligned:
        return ANYWHERE
    if found is not None:
        return found.cuda if backend == "cuda" else found.hip
    return ELEMENTWISE[backend]


def over(figures: Figures, budget: Budget) -> Iterator[str]:
    """`registers: 48, at most 32`, for each figure that is too high."""
    for name, most in asdict(budget).items():
        number: Any = getattr(figures, name)
        if number > most:
            yield f"{name}: {number}, at most {most}"
