"""Checkpoints of untrained models, and training checkpoints of which only the model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_zero import initialize
from hf_zero.api.engine import ZeroEngine
from hf_zero.checkpoint import CheckpointError, open_checkpoint
from hf_zero.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from tests.checkpoint.training import new_engine, same, train, weights_of
from tests.support.ranks import run_each


def untrained(stage: int, world: int, seed: int, **sections: Any) -> ZeroEngine:
    """An engine without optimizer."""
    engine = new_engine(stage, world, seed=seed, make=lambda groups: None, **sections)
    engine.module.seen.fill_(seed)
    return engine


def run_saving(rank: int, stage: int, root: str, background: bool) -> dict[str, Tensor]:
    engine = untrained(stage, 2, 3, hf_zero={"checkpoint": {"async": background}})
    engine.save_checkpoint(root, client_state={"note": "hello"})
    engine.save_checkpoint(root, tag="trainable", save_latest=False, exclude_frozen_parameters=True)
    found = weights_of(engine)
    engine.destroy()  # waits for the asynchronous save
    return found


def run_loading(rank: int, stage: int, root: str) -> dict[str, Tensor]:
    engine = untrained(stage, 2, 4)
    path, client_state = engine.load_checkpoint(root)
    assert path == f"{root}/global_step0" and client_state is not None and client_state["note"] == "hello"
    return weights_of(engine)


# Saving stage, whether it saves asynchronously, loading stage.
WAYS = [(0, False, 3), (2, False, 0), (3, True, 2), (3, False, 3)]


def test_an_engine_without_optimizer_saves_and_loads_its_model(tmp_path: Path) -> None:
    roots = [tmp_path / str(number) for number in range(len(WAYS))]
    saves = [(stage, str(root), background) for root, (stage, background, _) in zip(roots, WAYS, strict=True)]
    saved = [ranks[0] for ranks in run_each(run_saving, 2, saves)]
    loads = [(other, str(root)) for root, (_, _, other) in zip(roots, WAYS, strict=True)]
    for root, expected, loaded in zip(roots, saved, run_each(run_loading, 2, loads), strict=True):
        assert all(same(found, expected) for found in loaded)
        check_files(root, expected)


def check_files(tmp_path: Path, expected: dict[str, Tensor]) -> None:
    assert same(get_fp32_state_dict_from_zero_checkpoint(tmp_path), expected)
    assert not list(tmp_path.rglob("*optim_states.pt"))
    assert {"frozen.weight", "frozen.bias"} == set(open_checkpoint(tmp_path).frozen) - set(
        open_checkpoint(tmp_path, "trainable").frozen
    )
    # It can also be trained from, but not as the continuation of a training.
    engine = new_engine(2, 1)
    with pytest.raises(CheckpointError, match=r"holds no optimizer state.*\n.*load_optimizer_states=False"):
        engine.load_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert same(weights_of(engine), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_training_checkpoint_is_loaded_to_evaluate(stage: int, tmp_path: Path) -> None:
    engine = new_engine(stage, 1, bf16={"enabled": True})
    train(engine, 0, 1, range(2))
    engine.save_checkpoint(str(tmp_path))
    other = untrained(stage, 1, 5, bf16={"enabled": True})
    other.load_checkpoint(str(tmp_path))
    assert same(weights_of(other), weights_of(engine)) and other.global_steps == 2


def test_lost_optimizer_files_do_not_look_like_a_model_alone(tmp_path: Path) -> None:
    """In a checkpoint of DeepSpeed, which has no manifest."""
    engine = new_engine(3, 1)
    engine.save_checkpoint(str(tmp_path))
    folder = tmp_path / "global_step0"
    for path in (*folder.glob("*optim_states.pt"), folder / "hf_zero_manifest.json"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"has no \*_optim_states.pt file"):
        open_checkpoint(tmp_path)


def test_an_engine_that_was_destroyed_saves_nothing(tmp_path: Path) -> None:
    engine = new_engine(2, 1)
    engine.destroy()
    with pytest.raises(RuntimeError, match=r"save_checkpoint\(\) after destroy\(\)"):
        engine.save_checkpoint(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


class RowSums(torch.optim.SGD):
    """Keeps one number per row, under a name that is not in any list of such optimizers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["row_sum"] = parameter.detach().reshape(len(parameter), -1).sum(1)
        return super().step(closure)


def test_states_that_nobody_expects_in_the_files_of_one_rank(tmp_path: Path) -> None:
    """Such an optimizer trained at stage 2, but its first save failed, after the training was done."""

    def new(seed: int) -> Any:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        config = {"train_batch_size": 1, "zero_optimization": {"stage": 2}}
        return initialize(model=model, optimizer=RowSums(model.parameters(), lr=0.1), config=config)[0]

    def step(engine: Any) -> Any:
        engine.backward(engine(torch.ones(1, 3)).sum())
        engine.step()
        return {name: value.clone() for name, value in engine.module.state_dict().items()}

    engine, resumed = new(0), new(1)
    step(engine)
    engine.save_checkpoint(str(tmp_path))
    resumed.load_checkpoint(str(tmp_path))
    sums = [state["row_sum"] for state in resumed.optimizer.state.values()]
    assert [value.shape for value in sums] == [(2,), (2,)]
    assert same(step(resumed), step(engine))
