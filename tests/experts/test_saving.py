"""Checkpoints with expert parallelism: they resume with any number of ranks per expert group, and have all experts."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from tests.experts.training import batches, engine_of, in_one_process, model_of
from tests.support.one_process import (
    Difference,
    assert_small,
    difference_of_weights,
    differences,
    train,
)
from tests.support.ranks import run_ranks

WORLD = 4
Way = tuple[int, int, int, int]  # stage and ranks per expert group for saving, and for resuming
DEFAULT: list[Way] = [(1, 2, 3, 4), (3, 2, 2, 1)]
ALL: list[Way] = [(2, 4, 1, 2), (1, 1, 3, 2), (3, 4, 3, 2), (2, 2, 1, 1), (3, 1, 2, 4)]


def _resumed(
    rank: int, ways: list[Way], kind: str, folder: str, device: str, copies: tuple[int, int]
) -> dict[str, Difference]:
    """`copies`: replicas of the states for saving and for resuming; 1: not replicated."""
    data, model = batches(WORLD * 4), model_of(kind)
    plain = in_one_process(model, data, together=WORLD)
    half = in_one_process(model, data[: WORLD * 2], together=WORLD)
    place = {"device": device, "nvme_path": folder}
    groups = [{"hf_zero": {"shard_group": WORLD // number}} if number > 1 else {} for number in copies]
    offload = {} if device == "none" else {"offload_optimizer": place, "offload_param": place}
    found: dict[str, Difference] = {}
    for number, (stage, size, stage_then, size_then) in enumerate(ways):
        engine = engine_of(model, stage, size, rank, offload, **groups[0])
        before = train(engine, data[: WORLD * 2])
        found[f"{stage}, {size}"] = differences(before, half.seen_by(rank, WORLD))
        engine.save_checkpoint(folder, f"{number}")
        engine.destroy()
        engine = engine_of(model, stage_then, size_then, rank, offload, **groups[1])
        engine.load_checkpoint(folder, f"{number}")
        after = train(engine, data[WORLD * 2 :])
        engine.destroy()
        name = f"{stage}, {size} to {stage_then}, {size_then}"
        found[name] = differences(before.then(after), plain.seen_by(rank, WORLD))
        if rank == 0:
            whole = get_fp32_state_dict_from_zero_checkpoint(folder, f"{number}")
            found[f"{stage}, {size}, whole"] = difference_of_weights(whole, half.weights)
    return found


def _check(ways: list[Way], kind: str, folder: Path, device: str = "none", copies: tuple[int, int] = (1, 1)) -> None:
    assert_small(run_ranks(_resumed, WORLD, ways, kind, str(folder), device, copies, timeout_s=1200))


def test_training_goes_on_with_other_groups(tmp_path: Path) -> None:
    _check(DEFAULT, "mixtral", tmp_path)


def test_copies_of_states_go_on(tmp_path: Path) -> None:
    _check([(2, 2, 3, 2)], "mixtral", tmp_path, copies=(2, 1))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("copies", [(2, 1), (1, 2), (2, 2)])
def test_copies_go_on_any_way(copies: tuple[int, int], tmp_path: Path) -> None:
    _check([(1, 2, 3, 2), (3, 2, 1, 1), (2, 1, 2, 2)], "mixtral", tmp_path, copies=copies)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["gpt-oss", "deepseek"])
def test_training_goes_on_any_way(kind: str, tmp_path: Path) -> None:
    _check(DEFAULT + ALL, kind, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_offloaded_training_goes_on(device: str, tmp_path: Path) -> None:
    _check([(3, 2, 3, 4), (1, 2, 2, 2), (3, 4, 1, 1)], "mixtral", tmp_path, device)
