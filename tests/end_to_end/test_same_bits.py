"""Twenty steps of Trainer give bitwise the same losses, norms and weights as before, compared by digests.

The bits of matrix products depend on the processor and the version of torch, so every digest is stored for both;
digests for a version and a kind of vector unit apply to all processors of which nothing more is known. Without digests
the tests are skipped. On a new processor they may fail: create its digests with `python -m
tests.end_to_end.test_same_bits` in a checkout of a known good state. Existing digests stay, and are only removed with
the reason why the bits had to change.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from pathlib import Path

import pytest
import torch

from tests.end_to_end.parity import Case, run_case

KEPT = Path(__file__).parent / "same_bits.json"
CASES = [
    Case(stage=0, processes=2),
    Case(stage=1, processes=2, accumulation=4, bf16=True),
    Case(stage=2, processes=2),
    Case(stage=3, processes=2, accumulation=4),
    Case(stage=3, processes=2, bf16=True, offload="nvme"),
    Case(stage=2, processes=2, offload="cpu", optimizer=True, scheduler=True),
]


def likes() -> str:
    """What the bits depend on besides our code, as far as torch reports it."""
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def here() -> str:
    """The same with the kind of processor, by which libraries choose kernels."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = dict(reversed([[half.strip() for half in line.split(":", 1)] for line in lines if ":" in line]))
    kind = [facts[name] for name in ("vendor_id", "cpu family", "model") if name in facts] or [platform.processor()]
    return f"{likes()}, {' '.join(kind)}"


def digest(case: Case, folder: Path) -> str:
    result = run_case(case, folder)
    found = hashlib.sha256(repr((result.losses, result.norms, result.rates)).encode())
    for name, weight in sorted(result.weights.items()):
        found.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        found.update(weight.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bits_have_not_changed(case: Case, tmp_path: Path) -> None:
    table = json.loads(KEPT.read_text())
    kept = table.get(here(), table.get(likes()))
    if kept is None:
        pytest.skip(f"no digests for {here()}")
    assert digest(case, tmp_path) == kept[str(case)], f"is {here()} a new processor? See the top of this file"


def main() -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    mine = kept.setdefault(here(), {})
    for case in CASES:
        if str(case) not in mine:
            with tempfile.TemporaryDirectory() as folder:
                mine[str(case)] = digest(case, Path(folder))
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
