"""Options of save_checkpoint and load_checkpoint, and errors that are raised before anything has changed."""

from __future__ import annotations

import os
import signal
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero import initialize
from hf_zero.api.engine import ZeroEngine
from hf_zero.checkpoint import CheckpointError, open_checkpoint
from hf_zero.checkpoint.consolidate import get_fp32_state_dict_from_zero_checkpoint
from hf_zero.params import consolidation
from tests.checkpoint.training import new_engine, same, settings, train, weights_of
from tests.support.ranks import RankFailure, run_ranks


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, ZeroEngine]:
    """A folder with checkpoints of steps 2 and 4, and the engine that wrote them."""
    engine = new_engine(2, 1)
    train(engine, 0, 1, range(2))
    engine.save_checkpoint(str(tmp_path))
    train(engine, 0, 1, range(2, 4))
    engine.save_checkpoint(str(tmp_path))
    return tmp_path, engine


def other_engine(stage: int = 2, **sections: Any) -> ZeroEngine:
    engine = new_engine(stage, 1, seed=7, **sections)
    train(engine, 0, 1, range(30, 31))
    return engine


def test_weights_without_optimizer_states(saved: tuple[Path, ZeroEngine]) -> None:
    engine = other_engine()
    moments = [state["exp_avg"].clone() for state in engine.optimizer.state.values()]
    engine.load_checkpoint(str(saved[0]), load_optimizer_states=False)
    assert same(weights_of(engine), weights_of(saved[1])) and engine.global_steps == 4
    kept = [state["exp_avg"] for state in engine.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, kept, strict=True))


WARM_UP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}}
CYCLE = {"type": "OneCycle", "params": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}}
EXPONENTIAL = {"type": "ExponentialLR", "params": {"gamma": 0.5}}


@pytest.mark.parametrize("schedule", [WARM_UP, CYCLE, EXPONENTIAL], ids=lambda each: str(each["type"]))
def test_the_rate_without_optimizer_states(schedule: dict[str, Any], tmp_path: Path) -> None:
    """A user continued with the weights and the schedule of a checkpoint, but a new optimizer. Its groups had the rate
    before the first update, which is 0 in a warm-up, and the first update changed nothing; as in DeepSpeed."""
    first = new_engine(2, 1, scheduler=schedule)
    train(first, 0, 1, range(3))
    first.save_checkpoint(str(tmp_path))
    again = new_engine(2, 1, scheduler=schedule)
    again.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert again.get_lr() == first.get_lr() != new_engine(2, 1, scheduler=schedule).get_lr()
    assert again.get_mom() == first.get_mom()
    for engine in (first, again):
        train(engine, 0, 1, range(3, 4))
    assert again.get_lr() == first.get_lr() and again.get_mom() == first.get_mom()


def test_the_module_alone(saved: tuple[Path, ZeroEngine]) -> None:
    engine = other_engine()
    rate = engine.get_lr()
    engine.load_checkpoint(str(saved[0]), load_module_only=True)
    assert same(weights_of(engine), weights_of(saved[1])) and engine.global_steps == 1 and engine.get_lr() == rate


def test_a_tag_chooses_and_latest_can_be_left(saved: tuple[Path, ZeroEngine]) -> None:
    root, writer = saved
    writer.save_checkpoint(str(root), tag="kept/aside", save_latest=False, client_state={"epoch": 3})
    assert (root / "latest").read_text() == "global_step4"
    engine = other_engine()
    assert engine.load_checkpoint(str(root), "global_step2")[0] == str(root / "global_step2")
    assert engine.global_steps == 2
    state = engine.load_checkpoint(str(root), "kept/aside")[1]
    assert state is not None and state["epoch"] == 3 and engine.global_steps == 4
    with pytest.raises(ValueError, match="a tag is the name of a folder inside save_dir"):
        writer.save_checkpoint(str(root), tag="../escaped")


def test_the_number_0_is_a_tag(saved: tuple[Path, ZeroEngine]) -> None:
    """`save_checkpoint(tag=epoch)` in epoch 0 overwrote global_step2, and `load_checkpoint(tag=0)` silently loaded the
    latest checkpoint instead."""
    root, writer = saved
    first: Any = 0
    writer.save_checkpoint(str(root), tag=first, save_latest=False, client_state={"epoch": 0})
    path, state = other_engine().load_checkpoint(str(root), tag=first)
    assert path == str(root / "0") and state is not None and state["epoch"] == 0
    with pytest.raises(CheckpointError, match="there is no checkpoint with the tag '0.0'"):
        other_engine().load_checkpoint(str(root), tag=first / 1)
    with pytest.raises(ValueError, match="a tag is the name of a folder inside save_dir"):
        writer.save_checkpoint(str(root), tag="")


class Counting(nn.Linear):
    """Has a number and a tensor as extra state, and with `odd` an object that no file can hold."""

    count, odd = 0, False

    def get_extra_state(self) -> Any:
        return iter(()) if self.odd else {"count": self.count, "halves": torch.full((2,), self.count / 2)}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]
        assert state["halves"].tolist() == [self.count / 2] * 2


@pytest.mark.parametrize(("first", "second"), [(0, 0), (2, 3), (3, 2), (3, 0)])
def test_states_of_modules_own_are_saved(first: int, second: int, tmp_path: Path) -> None:
    """State dicts and DeepSpeed's files contain the result of `get_extra_state`; hf_zero's silently omitted it."""
    model = nn.Sequential(Counting(3, 3), Counting(3, 3))
    engine = initialize(model=model, config=settings(first, 1))[0]
    model[0].count, model[1].odd = 7, True  # type: ignore[assignment]
    engine.save_checkpoint(str(tmp_path), client_state={"note": 1})
    other = nn.Sequential(Counting(3, 3), Counting(3, 3))
    engine = initialize(model=other, config=settings(second, 1))[0]
    _, state = engine.load_checkpoint(str(tmp_path))
    assert (other[0].count, other[1].count) == (7, 0) and state is not None and "extra_states" not in state
    weights = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert sorted(weights) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    module = {**engine.module_state_dict(), "0._extra_state": {"count": 4, "halves": torch.full((2,), 2.0)}}
    engine.load_module_state_dict({"module": module})  # failed, as if the dict were a part of a file
    assert other[0].count == 4


def test_a_tag_may_be_a_symbolic_link(saved: tuple[Path, ZeroEngine]) -> None:
    """A link `best` to a checkpoint was replaced, and the save failed with "earlier checkpoints are unchanged", because
    a link cannot be removed like a folder. A broken link could not be replaced either."""
    root, writer = saved
    for name, target in (("best", "global_step2"), ("nowhere", "gone")):
        (root / name).symlink_to(target)
        writer.save_checkpoint(str(root), tag=name)
        assert not (root / name).is_symlink() and (root / "latest").read_text() == name
    engine = other_engine()
    assert engine.load_checkpoint(str(root), "best")[0] == str(root / "best") and engine.global_steps == 4
    assert engine.load_checkpoint(str(root), "global_step2")[0] is not None and engine.global_steps == 2
    assert not list(root.glob(".*"))


@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2), (3, 0)])
def test_a_client_state_that_was_loaded_is_given_to_the_next_save(first: int, second: int, tmp_path: Path) -> None:
    """DeepSpeed's tutorial saves with the dictionary that `load_checkpoint` returned. This dictionary describes the
    layout of the loaded files and was written into the new ones: a load at another stage could not read those."""
    writer, root = new_engine(first, 1), str(tmp_path)
    train(writer, 0, 1, range(2))
    writer.save_checkpoint(root, client_state={"step": 2})
    engine = new_engine(second, 1, seed=7)
    _, state = engine.load_checkpoint(root)
    assert state is not None
    train(engine, 0, 1, range(2, 4))
    engine.save_checkpoint(root, client_state={**state, "step": 4, "module": "of the program's own"})
    before, samples = weights_of(engine), engine.global_samples
    resumed = other_engine(second)
    _, state = resumed.load_checkpoint(root)
    assert state is not None and state["step"] == 4 and resumed.global_samples == samples
    assert same(before, weights_of(resumed))


@pytest.mark.parametrize("tag", ["latest", "latest_universal", "zero_to_fp32.py", "latest/1"])
def test_a_tag_that_is_the_name_of_a_file_beside_checkpoints(tag: str, saved: tuple[Path, ZeroEngine]) -> None:
    """`save_checkpoint(tag="latest")` created a folder of that name, so no later save could write the file."""
    with pytest.raises(AssertionError, match="use another tag"):
        saved[1].save_checkpoint(str(saved[0]), tag=tag)
    assert (saved[0] / "latest").is_file() and saved[1].save_checkpoint(str(saved[0]), tag="latest_one")


def test_a_folder_in_the_place_of_latest(saved: tuple[Path, ZeroEngine]) -> None:
    """A folder `latest` counted as missing: nothing was loaded, and only a warning was logged."""
    (saved[0] / "latest").unlink()
    (saved[0] / "latest").mkdir()
    with pytest.raises(CheckpointError, match="is a folder, but should be a file with the tag of the newest"):
        other_engine().load_checkpoint(str(saved[0]))


def test_frozen_weights_can_be_left_out(tmp_path: Path) -> None:
    new_engine(2, 1).save_checkpoint(str(tmp_path), exclude_frozen_parameters=True)
    assert open_checkpoint(tmp_path).frozen == {}
    engine = other_engine()
    frozen = engine.module.frozen.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"lacks 'frozen.bias', 'frozen.weight', which the model has"):
        engine.load_checkpoint(str(tmp_path))
    engine.load_checkpoint(str(tmp_path), load_module_strict=False)
    assert torch.equal(engine.module.frozen.weight, frozen)


class Other(nn.Module):
    """Shares one parameter name with AwkwardMLP, with another shape, and has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)


def test_another_model_is_refused_and_stays_as_it_is(saved: tuple[Path, ZeroEngine]) -> None:
    engine = initialize(model=Other(), config=settings(2, 1))[0]
    before = weights_of(engine)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"'head.weight' has the shape \(3, 13\) there and \(3, 4\) in"):
            engine.load_checkpoint(str(saved[0]), load_module_strict=strict)
    assert same(before, weights_of(engine)) and engine.global_steps == 0


SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "scheduler": {"type": None}}
ADAFACTOR = {"optimizer": {"type": "Adafactor", "params": {"lr": 1e-2}}, "scheduler": {"type": None}}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, SGD, "holds the optimizer states exp_avg, exp_avg_sq; SGD has momentum_buf"),
        (ADAFACTOR, {}, r"states of whole tensors.*\n.*load_optimizer_states=False"),
    ],
    ids=["SGD", "Adafactor"],
)
def test_the_states_of_another_optimizer_are_refused(
    first: dict[str, Any], second: dict[str, Any], words: str, tmp_path: Path
) -> None:
    writer = new_engine(0, 1, **first)
    train(writer, 0, 1, range(2))
    writer.save_checkpoint(str(tmp_path))
    engine = other_engine(0, **second)
    before = weights_of(engine)
    with pytest.raises(CheckpointError, match=words):
        engine.load_checkpoint(str(tmp_path))
    assert same(before, weights_of(engine))
    engine.load_checkpoint(str(tmp_path), load_optimizer_states=False)
    assert same(weights_of(writer), weights_of(engine))


def test_damage_is_named_with_an_intact_checkpoint_and_nothing_changes(saved: tuple[Path, ZeroEngine]) -> None:
    root, _ = saved
    victim = root / "global_step4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    engine = other_engine()
    before = weights_of(engine)
    with pytest.raises(CheckpointError, match=rf"{victim.name}: differs from its checksum.*\n.*Intact: .*global_step2"):
        engine.load_checkpoint(str(root))
    assert same(before, weights_of(engine)) and engine.global_steps == 1
    engine.load_checkpoint(str(root), "global_step2")
    assert engine.global_steps == 2


def test_optimizer_files_cost_twelve_bytes_per_parameter(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 512)).bfloat16()
    engine = initialize(model=model, config={**settings(2, 1), "bf16": {"enabled": True}})[0]
    engine.backward(engine(torch.ones(12, 512, dtype=torch.bfloat16)).sum())
    engine.step()
    engine.save_checkpoint(str(tmp_path))
    size = sum(path.stat().st_size for path in tmp_path.rglob("*optim_states.pt"))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert 12 * count <= size <= 12 * count + 1_000_000


def run_killed_while_saving(rank: int, root: str) -> None:
    """Rank 1 is killed while writing its second checkpoint."""
    engine = new_engine(2, 2)
    train(engine, rank, 2, range(2))
    engine.save_checkpoint(root)
    train(engine, rank, 2, range(2, 3))
    if rank == 1:
        original = os.pwrite

        def killed(file: int, block: Any, offset: int) -> int:
            original(file, bytes(block)[: len(block) // 2], offset)
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
            return 0

        os.pwrite = killed  # type: ignore[assignment]
    engine.save_checkpoint(root)


def test_a_rank_killed_while_saving_costs_only_that_checkpoint(tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(RankFailure, match="rank 1"):
        run_ranks(run_killed_while_saving, 2, str(tmp_path))
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert [path.is_dir() for path in tmp_path.glob(".global_step3.*.partial")] == [True]
    assert not (tmp_path / "global_step3").exists()
    engine = other_engine()
    with caplog.at_level("WARNING", logger="hf_zero"):
        assert engine.load_checkpoint(str(tmp_path))[0] == str(tmp_path / "global_step2")
    assert ".partial is from an interrupted save; it is ignored" in caplog.text


def run_different_tags(rank: int, root: str, rule: str) -> list[str]:
    engine = new_engine(1, 2, checkpoint={"tag_validation": rule})
    engine.save_checkpoint(root, tag=f"step-of-{rank}")
    return sorted(path.name for path in Path(root).iterdir())


def test_ranks_that_name_the_tag_differently(tmp_path: Path) -> None:
    expected = ["latest", "step-of-0", "zero_to_fp32.py"]
    assert run_ranks(run_different_tags, 2, str(tmp_path), "Warn") == [expected] * 2
    with pytest.raises(RankFailure, match="'step-of-0', 'step-of-1' .checkpoint.tag_validation is Fail"):
        run_ranks(run_different_tags, 2, str(tmp_path), "fail")


def run_whole_weights(rank: int, stage: int, root: str) -> bool:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 20}
    engine = new_engine(stage, 2, bf16={"enabled": True}, zero_optimization=zero)
    train(engine, rank, 2, range(2))
    engine.save_16bit_model(root)
    expected = engine.module_state_dict()
    saved = torch.load(Path(root) / "pytorch_model.bin", weights_only=True)
    assert list(saved) == list(expected) and saved["tie.weight"].data_ptr() == saved["tied.weight"].data_ptr()
    engine.save_16bit_model(root, "trained.bin", exclude_frozen_parameters=True)
    trained = torch.load(Path(root) / "trained.bin", weights_only=True)
    assert set(expected) - set(trained) == {"frozen.weight", "frozen.bias"}
    return same(saved, expected) and same(trained, {name: expected[name] for name in trained})


@pytest.mark.parametrize("stage", [2, 3])
def test_whole_weights_are_written_as_they_are_gathered(stage: int, tmp_path: Path) -> None:
    assert run_ranks(run_whole_weights, 2, stage, str(tmp_path)) == [True, True]


def run_watched_gathers(rank: int, root: str) -> tuple[int, int]:
    """Peak bytes of gathered weights that are alive at the same time, and bytes of all weights."""
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True, "stage3_param_persistence_threshold": 0}
    engine = new_engine(3, 2, zero_optimization={**zero, "stage3_max_live_parameters": 0})
    train(engine, rank, 2, range(1))
    alive: list[Any] = []
    peak = 0
    original = consolidation.all_gather_values

    def watched(handles: Any) -> Any:
        nonlocal peak
        found = original(handles)
        alive.extend(weakref.ref(tensor) for tensor in found)
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for r in alive if (t := r()) is not None
        }
        peak = max(peak, sum(storages.values()))
        return found

    consolidation.all_gather_values, consolidation.MAX_GATHERED_NUMEL = watched, 1
    engine.save_16bit_model(root)
    return peak, sum(parameter.numel() * 4 for parameter in engine.module.parameters())


def test_no_rank_ever_holds_the_whole_model(tmp_path: Path) -> None:
    for peak, total in run_ranks(run_watched_gathers, 2, str(tmp_path)):
        assert 0 < peak < total / 2, "two parameters at a time: the one being written, and the next"
    assert len(torch.load(tmp_path / "pytorch_model.bin", weights_only=True)) > 10


def run_unwritable(rank: int, root: str) -> None:
    engine = new_engine(2, 2)
    blocked = Path(root) / "file"
    blocked.touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: was not written \((NotADirectory|FileExists)Error"):
        engine.save_16bit_model(str(blocked))
    train(engine, rank, 2, range(1))  # no rank is left waiting


def test_a_folder_that_cannot_be_written_to_fails_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(run_unwritable, 2, str(tmp_path))


def test_checkpoints_without_latest_are_not_a_fresh_start(tmp_path: Path) -> None:
    """A job whose `latest` file was lost (copied by a pattern, deleted by a clean-up) loaded nothing, with one line in
    the log, trained from scratch and overwrote its checkpoints."""
    engine = other_engine()
    assert engine.load_checkpoint(str(tmp_path))[0] is None
    engine.save_checkpoint(str(tmp_path), tag="first")
    (tmp_path / "latest").unlink()
    with pytest.raises(CheckpointError, match="latest: is missing, but this folder contains checkpoints: first"):
        engine.load_checkpoint(str(tmp_path))
    with pytest.raises(
        CheckpointError, match="latest: is missing: this is the folder of a single tag(.|\n)*tag='first'"
    ):
        engine.load_checkpoint(str(tmp_path / "first"))
    assert engine.load_checkpoint(str(tmp_path), tag="first")[0] == str(tmp_path / "first")
