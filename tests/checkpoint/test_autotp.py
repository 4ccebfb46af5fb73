"""DeepSpeed's AutoTP and hf_zero's tensor parallelism: each goes on from the other's files, also with other parts.

The two cut models differently: DeepSpeed keeps an embedding whole that hf_zero cuts, and cuts a tied one that hf_zero
keeps whole. `test_affine_maps.py` has the maps themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero import ds_to_universal
from hf_zero.checkpoint import open_checkpoint
from hf_zero.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from hf_zero.checkpoint.view import MASTER
from tests.checkpoint.test_affine_maps import SCRIPT, states_of
from tests.checkpoint.test_interchange import SAVED, ask, assert_continues, loading, run, saving

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(900)]

# DeepSpeed refuses transformers' plan of Phi3, and its attention needs q, k and v whole.
FUSED = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [".*gate_up_proj.*"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
        {"patterns": [".*down_proj.*"], "partition_type": "row"},
        {"patterns": [".*"], "partition_type": "skip"},
    ],
}
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def convert(folder: Path, oracle: str | None) -> Path:
    """The folder around a universal checkpoint, made by DeepSpeed's converter, or (None) by ours."""
    root = folder / ("by_deepspeed" if oracle else "by_hf_zero")
    words = ["--input_folder", str(folder / "ckpt" / f"global_step{SAVED}"), "--output_folder", str(root / "universal")]
    if oracle:
        ask(oracle, "-m", "deepspeed.checkpoint.ds_to_universal", *words)
    else:
        assert ds_to_universal.main(words) == 0
    return root


def assert_same_universal(ours: Path, theirs: Path, *, tied: bool = False) -> None:
    """Of tied names, DeepSpeed's converter writes the first rank's part below stage 3, which nothing reads."""
    ours_by_key, theirs_by_key = states_of(ours / "universal"), states_of(theirs / "universal")
    different = {key for key, value in theirs_by_key.items() if not torch.equal(ours_by_key[key], value)}
    assert ours_by_key.keys() >= theirs_by_key.keys()
    assert different == ({("lm_head.weight", MASTER)} if tied else set())


@pytest.mark.parametrize(
    ("kind", "stage", "dtype", "processes"),
    [
        ("uneven", 1, "fp32", 2),
        ("uneven", 3, "fp32", 4),
        ("uneven", 2, "bf16", 2),
        ("fused", 2, "fp32", 2),
        ("tied", 1, "bf16", 2),
        ("tied", 3, "fp32", 2),
        ("even", 1, "bf16", 4),
    ],
)
def test_we_resume_from_autotp(kind: str, stage: int, dtype: str, processes: int, tmp_path: Path, oracle: str) -> None:
    """With as many ranks per tensor group, with three, and with one, from its files and from the universal form."""
    partition = {"config": {"tensor_parallel": {"partition_config": FUSED}}} if kind == "fused" else {}
    saved = run(saving(stage, dtype, tmp_path, kind=kind, tensor=2, **partition), tmp_path, processes, oracle, SCRIPT)
    theirs, ours = convert(tmp_path, oracle), convert(tmp_path, None)
    assert_same_universal(ours, theirs, tied=kind == "tied" and stage < 3)
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ckpt")
    whole = open_checkpoint(theirs, "universal")
    assert all(torch.equal(weights[name].flatten(), whole.read(name)) for name in whole.shapes)
    runs: list[tuple[int, int, int, dict[str, Any]]] = [(stage, 2, 2, {}), (3 - stage if stage < 3 else 1, 1, 1, {})]
    if kind == "uneven":
        runs.append((stage, 3, 3, {}))
    runs.append((stage, 2, 2, {"load": str(theirs), "config": UNIVERSAL}))
    for at, tensor, ranks, more in runs:
        case = loading(at, dtype, tmp_path, kind=kind, tensor=tensor) | more
        assert_continues(saved, run(case, tmp_path, ranks, None, SCRIPT), dtype)


@pytest.mark.parametrize(
    ("kind", "stage", "dtype"), [("uneven", 1, "fp32"), ("uneven", 3, "fp32"), ("tied", 2, "bf16")]
)
def test_autotp_resumes_from_our_parts(kind: str, stage: int, dtype: str, tmp_path: Path, oracle: str) -> None:
    """From the universal form, in which neither program's parts matter: made by either converter."""
    saved = run(saving(stage, dtype, tmp_path, kind=kind, tensor=2), tmp_path, 2, None, SCRIPT)
    theirs, ours = convert(tmp_path, oracle), convert(tmp_path, None)
    assert_same_universal(ours, theirs, tied=kind == "tied" and stage < 3)
    for tensor, root in ((2, ours), (1, theirs)):
        case = loading(stage, dtype, tmp_path, kind=kind, tensor=tensor) | {"load": str(root), "config": UNIVERSAL}
        assert_continues(saved, run(case, tmp_path, tensor, oracle, SCRIPT), dtype)
