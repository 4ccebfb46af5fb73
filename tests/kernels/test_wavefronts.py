"""The source of each thread of a wavefront, against AMD's manual."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.requirements import requires
from tests.support.wavefronts import Unreadable, dpp_sources, swizzle_sources


@pytest.mark.parametrize(
    ("control", "read_by_0", "read_by_21", "read_by_63"),
    [
        (0x1B, 3, 22, 60),  # quad_perm [3, 2, 1, 0]
        (0x104, 4, 25, -2),  # row_shl by 4
        (0x111, -2, 20, 62),  # row_shr by 1
        (0x118, -2, -2, 55),
        (0x128, 8, 29, 55),  # row_ror by 8
        (0x141, 7, 18, 56),  # row_half_mirror
        (0x142, -2, 15, 47),  # row_bcast 15
        (0x143, -2, -2, 31),
    ],
)
def test_data_parallel_primitives(control: int, read_by_0: int, read_by_21: int, read_by_63: int) -> None:
    sources = dpp_sources(control, 15, 15, zeroes=True)
    assert (sources[0], sources[21], sources[63]) == (read_by_0, read_by_21, read_by_63)
    masked = dpp_sources(control, 0b1101, 15, zeroes=True)  # without the second row
    assert masked[:16] == sources[:16] and masked[16:32] == [-1] * 16 and masked[32:] == sources[32:]


def test_swizzles() -> None:
    assert swizzle_sources(0x401F) == [thread ^ 16 for thread in range(64)]
    assert swizzle_sources(0x0018)[:9] == [0] * 8 + [8]
    assert swizzle_sources(0x80B1)[60:] == [61, 60, 63, 62]


def test_what_is_not_known_is_not_run() -> None:
    with pytest.raises(Unreadable, match="0x130"):
        dpp_sources(0x130, 15, 15, zeroes=True)


PARTING = """
define amdgpu_kernel void @parting(ptr addrspace(1) %0) #0 {
  %2 = tail call i32 @llvm.amdgcn.workitem.id.x()
  %3 = icmp ult i32 %2, LEAST
  br i1 %3, label %5, label %4
4:
  tail call void @llvm.amdgcn.s.barrier()
  br label %5
5:
  ret void
}
attributes #0 = { nounwind }
"""
RUN = """
from tests.support.executed import Program, Threads
Program({text!r}).run([None], (2,), 64, Threads())
"""


@requires(modules=("llvmlite",))
@pytest.mark.parametrize(("least", "ends"), [(0, True), (64, True), (1, False)])
def test_threads_that_part_at_a_barrier_end_the_process(least: int, ends: bool) -> None:
    """On a GPU they would wait for each other forever."""
    code = RUN.format(text=PARTING.replace("LEAST", str(least)))
    assert (subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0) == ends
