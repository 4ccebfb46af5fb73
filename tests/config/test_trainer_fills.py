"""transformers fills in the autos of the ready configs, and the resolver accepts the result."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hf_zero.config import Resolved, resolve
from tests.config.test_ready_configs import ALL
from tests.support.ranks import run_ranks


def run_filling(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    """Runs in a separate process, because transformers keeps the config in globals."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    from hf_zero.config import Findings
    from tests.config.fill_with_transformers import filled

    Findings.absent_folders = lambda self: iter(())  # type: ignore[method-assign]  # this machine has no /local_nvme
    return {str(path): json.loads(json.dumps(filled(str(path), folder))) for path in ALL}


def test_filled_by_transformers(tmp_path: Path) -> None:
    (filled,) = run_ranks(run_filling, 1, str(tmp_path), init=False)
    assert len(filled) == len(ALL) == 10
    for path, config in filled.items():
        check(resolve(config, world_size=1), "fp16" if "fp16" in path else "bf16")
        assert "auto" in Path(path).read_text()


def check(resolved: Resolved, model: str) -> None:
    assert (resolved.batch.micro_batch_size, resolved.batch.accumulation_steps) == (3, 2)
    assert resolved.gradients.clip_norm == 0.5
    assert resolved.precision.model == model
    assert resolved.zero.bucket_numel == 64 * 64
    assert not [note for note in resolved.notes if '"auto"' in note]
    if resolved.optimizer is not None:
        assert resolved.optimizer.params == {"lr": 2e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.01}
    if resolved.scheduler is not None:
        steps = {"warmup_num_steps": 4, "total_num_steps": 100}
        assert resolved.scheduler.params == {"warmup_min_lr": 0.0, "warmup_max_lr": 2e-4, **steps}
