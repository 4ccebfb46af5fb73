"""Checkpoints of earlier versions, stored here with their contents, load bitwise.

`python -m tests.checkpoint.test_written_before` writes the missing ones. Existing files are never rewritten, because a
test of rewritten files would be meaningless.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero.api.parameter_access import safe_get_full_fp32_param, safe_get_full_optimizer_state
from hf_zero.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.training import new_engine, train
from tests.support.ranks import run_ranks

FOLDER = Path(__file__).parent / "written_before"
WORLD = 2
STATES = ("exp_avg", "exp_avg_sq")
BF16 = {"bf16": {"enabled": True}}


def of_type(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-2, **params}}}


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "stage0": (0, {}),
    "stage1_bf16": (1, BF16),
    "stage1_onebit_adam": (1, of_type("OneBitAdam", freeze_step=2)),
    "stage2": (2, {}),
    "stage2_lion_bf16": (2, {**of_type("Lion"), **BF16}),
    "stage3": (3, {}),
    "stage3_bf16": (3, BF16),
}


def write(rank: int, world: int, name: str, root: str) -> None:
    stage, sections = CASES[name]
    engine = new_engine(stage, world, **sections)
    train(engine, rank, world, range(4))
    engine.save_checkpoint(root, client_state={"note": name})


def digest(values: dict[str, torch.Tensor]) -> str:
    """A digest of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, value in sorted(values.items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def read(rank: int, world: int, name: str, root: str) -> dict[str, str]:
    """The state of an engine after loading: fp32 weights, optimizer states, 16-bit weights, counters."""
    stage, sections = CASES[name]
    engine = new_engine(stage, world, seed=9, **sections)
    path, client_state = engine.load_checkpoint(root)
    assert path is not None and client_state is not None and client_state["note"] == name
    masters, states = {}, {}
    for key, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            masters[key] = safe_get_full_fp32_param(parameter).clone()
            for kind in STATES:
                value = safe_get_full_optimizer_state(parameter, kind)
                if value is not None:
                    states[f"{key}.{kind}"] = value.clone()
    counters = [engine.global_steps, engine.global_samples, engine.skipped_steps, engine.get_lr()]
    return {"masters": digest(masters), "states": digest(states), "counters": repr(counters)}


def contents(name: str, root: Path) -> dict[str, Any]:
    """As read by engines on as many ranks as wrote it, by one rank, and by zero_to_fp32."""
    same, *others = run_ranks(read, WORLD, WORLD, name, str(root))
    assert all(other == same for other in others)
    alone = run_ranks(read, 1, 1, name, str(root))[0] if "onebit" not in name else same
    assert alone == same
    return {**same, "fp32": digest(get_fp32_state_dict_from_zero_checkpoint(str(root)))}


@pytest.mark.parametrize("name", CASES)
def test_loads_to_the_same_bits(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(FOLDER / f"{name}.zip") as archive:
        archive.extractall(tmp_path)
    assert contents(name, tmp_path) == json.loads((FOLDER / "contents.json").read_text())[name]


def main() -> None:
    listed = FOLDER / "contents.json"
    known = json.loads(listed.read_text()) if listed.exists() else {}
    for name in CASES.keys() - known.keys():
        with tempfile.TemporaryDirectory() as folder:
            run_ranks(write, WORLD, WORLD, name, folder)
            with zipfile.ZipFile(FOLDER / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
                for path in sorted(Path(folder).rglob("*")):
                    archive.write(path, path.relative_to(folder))
            known[name] = contents(name, Path(folder))
    listed.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
