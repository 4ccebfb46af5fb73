"""Loading a checkpoint from before the first update resets the optimizer.

Such a checkpoint has no optimizer states, so loading it in the middle of a run kept the current moments: the weights of
step 0 trained with the moments of step 3, and silently diverged from the first run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.api.test_outside_forward import engine_of, step
from tests.support.ranks import run_each


def _back_to_the_start(rank: int, folder: str, stage: int, optimizer: dict[str, Any], offload: bool) -> None:
    zero = {"offload_optimizer": {"device": "cpu"}} if offload else {}
    engine = engine_of({}, optimizer=optimizer, zero_optimization={"stage": stage, **zero})
    engine.save_checkpoint(folder)

    def three_steps() -> dict[str, Tensor]:
        for seed in range(3):
            step(engine, seed)
        return {name: value.clone() for name, value in engine.module_state_dict().items()}

    first = three_steps()
    engine.load_checkpoint(folder, tag="global_step0")
    assert engine.global_steps == 0
    again = three_steps()
    assert [name for name in first if not torch.equal(first[name], again[name])] == []


def test_its_moments_are_gone_too(tmp_path: Path) -> None:
    kinds = [
        ("Adam", 0, False),
        ("Adam", 3, True),
        ("RMSprop", 2, True),
        ("RMSprop", 3, False),
        ("Lamb", 2, False),
        ("Muon", 3, False),
        ("Adagrad", 2, True),
    ]
    cases = [
        (str(tmp_path / f"{kind}-{stage}"), stage, {"type": kind, "params": {"lr": 1e-2}}, offload)
        for kind, stage, offload in kinds
    ]
    assert len(run_each(_back_to_the_start, 2, cases)) == len(kinds)
