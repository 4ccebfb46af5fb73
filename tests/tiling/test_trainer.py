"""An unmodified Trainer with tiled MLPs and loss, by ds.json alone, against plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

from tests.end_to_end.parity import Case, assert_parity, outcome, run_script
from tests.support.ranks import run_ranks
from tests.tiling.test_models import BOTH, small


def run_in_small_tiles(rank: int, words: list[str]) -> None:
    with small():
        run_script(rank, words)


def test_ds_json_alone(tmp_path: Path) -> None:
    """Stage 3, two ranks, accumulation with different numbers of labels, checkpointed layers, a tied head."""
    case = Case(stage=3, processes=2, accumulation=2, clip=True, tied=True, checkpointing="not_reentrant")
    words = case.words(tmp_path)
    config = case.ds_config
    (tmp_path / "ds.json").write_text(json.dumps({**config, "hf_zero": {**config.get("hf_zero", {}), **BOTH}}))
    run_ranks(run_in_small_tiles, 2, words, init=False)
    assert_parity(case, outcome(tmp_path))
