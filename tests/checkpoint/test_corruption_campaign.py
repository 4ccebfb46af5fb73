"""Random damage to checkpoints: each is detected and named, and nothing of the checkpoint is loaded."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hf_zero.api.engine import ZeroEngine
from hf_zero.checkpoint import CheckpointError
from hf_zero.checkpoint.deepspeed.keys import MANIFEST
from tests.checkpoint.training import new_engine, train
from tests.support.ranks import run_ranks

SEED = 411
PER_STAGE = [15, pytest.param(50, marks=pytest.mark.slow)]
BF16 = {"bf16": {"enabled": True}}


def run_saving(rank: int, stage: int, root: str) -> None:
    engine = new_engine(stage, 2, **BF16)
    train(engine, rank, 2, range(2))
    engine.save_checkpoint(root)


def everything_in(engine: ZeroEngine) -> list[Tensor]:
    """Copies of everything that a load changes."""
    shards = engine.optimizer.sub_groups
    states = [value for state in engine.optimizer.state.values() for value in state.values()]
    counters = torch.tensor([engine.global_steps, engine.micro_steps, engine.lr_scheduler.last_batch_iteration])
    tensors = [*engine.module.state_dict().values(), *(shard.master for shard in shards), counters]
    return [value.clone() for value in [*tensors, *(value for value in states if isinstance(value, Tensor))]]


def damage(victim: Path, kind: str, dice: random.Random) -> str:
    """Damages the file; returns a description."""
    data = bytearray(victim.read_bytes())
    place = dice.randrange(len(data))
    if kind == "delete":
        victim.unlink()
    elif kind == "truncate":
        victim.write_bytes(data[:place])
    else:
        data[place] ^= 1 << dice.randrange(8)
        victim.write_bytes(data)
    return f"{kind} {victim.name} at {place}"


@pytest.mark.parametrize("number", PER_STAGE)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_damage_is_named_and_nothing_is_half_loaded(tmp_path: Path, stage: int, number: int) -> None:
    print(f"seed {SEED + stage}")
    dice = random.Random(SEED + stage)
    run_ranks(run_saving, 2, stage, str(tmp_path / "whole"))
    source = tmp_path / "whole" / "global_step2"
    victims = sorted(path.name for path in source.iterdir())
    engine = new_engine(stage, 1, seed=7, **BF16)
    train(engine, 0, 1, range(5))
    before = everything_in(engine)
    copy = tmp_path / "damaged" / source.name
    for _ in range(number):
        shutil.rmtree(copy.parent, ignore_errors=True)
        shutil.copytree(source, copy)
        victim = dice.choice(victims)
        done = damage(copy / victim, dice.choice(("delete", "truncate", "flip", "flip")), dice)
        with pytest.raises(CheckpointError) as error:
            engine.load_checkpoint(str(copy.parent), source.name)
        assert str(copy) in str(error.value), done
        # With a damaged manifest, the error may name another file that does not match it.
        assert victim in str(error.value) or victim == MANIFEST, (done, str(error.value))
        after = everything_in(engine)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), done
    engine.load_checkpoint(str(source.parent))
    assert engine.global_steps == 2
