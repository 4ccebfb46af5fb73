"""An unmodified Trainer with all features for long sequences enabled in ds.json, compared with plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

from hf_zero.activations.kept import CheckpointedCalls
from tests.end_to_end.parity import SHORT, Case, assert_parity, outcome, run_script
from tests.support.late import Late, use
from tests.support.ranks import run_ranks
from tests.tiling.test_models import BOTH, small


def run_in_small_tiles(rank: int, words: list[str]) -> int:
    """On a device with late copies; returns the number of checkpointed calls."""
    run, calls = CheckpointedCalls.run, []

    def counted(self: CheckpointedCalls, *args: Any, **options: Any) -> Any:
        calls.append(self)
        return run(self, *args, **options)

    with small(), use(Late()), mock.patch.object(CheckpointedCalls, "run", counted):
        run_script(rank, words)
    assert all(one.policy.cpu_checkpointing and one.policy.contiguous_memory_optimization for one in calls)
    return len(calls)


def test_ds_json_alone(tmp_path: Path) -> None:
    """Stage 3, two ranks, accumulation with different numbers of labels, checkpointed layers, a tied head."""
    case = Case(stage=3, processes=2, accumulation=2, clip=True, tied=True, checkpointing="not_reentrant", steps=SHORT)
    words = case.words(tmp_path)
    config = case.ds_config
    activations = {"cpu_checkpointing": True, "contiguous_memory_optimization": True}
    config |= {"hf_zero": {**config.get("hf_zero", {}), **BOTH}, "activation_checkpointing": activations}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    num_calls = run_ranks(run_in_small_tiles, 2, words, init=False)
    assert num_calls[0] >= 2 * SHORT and num_calls[0] == num_calls[1]
    assert_parity(case, outcome(tmp_path))
