"""Checkpoints of per-matrix optimizer states, between any numbers of ranks and any stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor

from hf_zero.checkpoint import CheckpointError, open_checkpoint
from hf_zero.checkpoint.extra_states import for_file, merged
from hf_zero.optim.updater import StateSlice
from tests.checkpoint.training import new_engine, train
from tests.support.ranks import run_each, run_ranks

BF16 = {"bf16": {"enabled": True}}
WHOLE: dict[str, Any] = {"hf_zero": {"optimizer_sees": "whole_tensors"}}
FLAT: dict[str, Any] = {"hf_zero": {"optimizer_sees": "flat_shards"}}


class Shampoo(torch.optim.Optimizer):
    """One matrix of statistics per dimension, of a different size than the parameter; minimal for a test."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                matrix, state = p.grad.reshape(len(p) if p.dim() else 1, -1), self.state[p]
                if not state:
                    state["step"], state["left"] = 0, torch.eye(len(matrix)) * 1e-2
                state["step"] += 1
                state["left"] += matrix @ matrix.T
                values, vectors = torch.linalg.eigh(state["left"])
                root = vectors @ torch.diag(values.clamp(min=1e-6).rsqrt()) @ vectors.T
                p.sub_((root @ matrix).view(p.shape), alpha=group["lr"])


class Blockwise(torch.optim.Optimizer):
    """Keeps one maximum per four elements, as 8-bit optimizers do."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    blocks = torch.nn.functional.pad(p.grad.reshape(-1), (0, -p.numel() % 4)).view(-1, 4)
                    state = self.state[p]
                    state.setdefault("absmax", torch.zeros(len(blocks))).lerp_(blocks.abs().amax(dim=1), 0.5)
                    change = blocks / (state["absmax"].unsqueeze(1) + 1e-3)
                    p.sub_(change.view(-1)[: p.numel()].view(p.shape), alpha=group["lr"])


KINDS: dict[str, Any] = {
    "Adafactor": lambda groups: Adafactor(groups),
    "Adafactor with momentum": lambda groups: Adafactor(groups, beta1=0.9, warmup_init=True),
    "Adafactor of torch": lambda groups: torch.optim.Adafactor(groups, lr=0.02),
    "Shampoo": Shampoo,
    "Blockwise": Blockwise,
    "AdamW amsgrad": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
}


def run_saving(rank: int, world: int, kind: str, stage: int, root: str, sections: dict[str, Any]) -> list[float]:
    """Three steps, a checkpoint, three more steps; returns the losses of the latter."""
    engine = new_engine(stage, world, make=KINDS[kind], **sections)
    train(engine, rank, world, range(3))
    engine.save_checkpoint(root)
    return train(engine, rank, world, range(3, 6))


def run_resumed(rank: int, world: int, kind: str, places: list[tuple[str, int, dict[str, Any]]]) -> list[list[float]]:
    """The losses after resuming from each (root, stage, sections) with this world size."""
    found = []
    for root, stage, sections in places:
        engine = new_engine(stage, world, make=KINDS[kind], seed=9, **sections)
        train(engine, rank, world, range(20, 21))
        engine.load_checkpoint(root)
        found.append(train(engine, rank, world, range(3, 6)))
    return found


SECTIONS = {"Blockwise": WHOLE, "AdamW amsgrad": WHOLE}


@pytest.mark.parametrize(
    ("kind", "runs_all"), [("Adafactor", False), *(pytest.param(kind, True, marks=pytest.mark.slow) for kind in KINDS)]
)
def test_any_number_of_ranks_and_any_stage_continues(kind: str, runs_all: bool, tmp_path: Path) -> None:
    """From every stage on 2 ranks to all stages on 1, 2 and 3 ranks: the same losses as without interruption."""
    sections = SECTIONS.get(kind, {})
    pairs = [(0, 1), (0, 3), (1, 0), (2, 3), (3, 1), (3, 3), (1, 2)][:: 1 if runs_all else 2]
    roots = {stage: str(tmp_path / str(stage)) for stage in {source for source, _ in pairs}}
    saves = [(2, kind, stage, root, sections) for stage, root in roots.items()]
    expected = {stage: ranks[0] for stage, ranks in zip(roots, run_each(run_saving, 2, saves), strict=True)}
    places = [(roots[source], target, sections) for source, target in pairs]
    for world in (1, 2, 3):
        found = run_ranks(run_resumed, world, world, kind, places)[0]
        for (source, target), losses in zip(pairs, found, strict=True):
            assert losses == pytest.approx(expected[source], rel=2e-5), (world, source, target)
            if (world, source) == (2, target):
                assert losses == expected[source], "to the bit on the same ranks"


def run_in_bf16(rank: int, stage: int, root: str) -> tuple[list[float], list[list[float]]]:
    expected = run_saving(rank, 2, "Adafactor", stage, root, BF16)
    return expected, run_resumed(rank, 2, "Adafactor", [(root, stage, BF16)])


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_bf16_with_fp32_masters(stage: int, tmp_path: Path) -> None:
    root = str(tmp_path)
    for expected, (found,) in run_ranks(run_in_bf16, 2, stage, root):
        assert found == expected
    (single,) = run_ranks(run_resumed, 1, 1, "Adafactor", [(root, stage, BF16)])
    assert single[0] == pytest.approx(expected, rel=0.02), "gradients are rounded on other rows"
    view = open_checkpoint(tmp_path)
    assert view.states() == () and {"exp_avg_sq_row", "exp_avg_sq_col"} <= set(view.whole_states["inner.weight"])


def test_what_files_say(tmp_path: Path) -> None:
    """Every rank writes the states that begin in its part; merged, they equal those of the optimizer class itself."""
    run_ranks(run_saving, 2, 2, "Adafactor with momentum", 3, str(tmp_path), {})
    (losses,) = run_ranks(run_saving, 1, 1, "Adafactor with momentum", 0, str(tmp_path / "whole"), {})
    ours, theirs = open_checkpoint(tmp_path), open_checkpoint(tmp_path / "whole")
    assert ours.states() == ("exp_avg",) and ours.whole_states.keys() == theirs.whole_states.keys()
    assert "lonely" not in ours.whole_states, "no gradient anywhere: no state"
    for name, state in theirs.whole_states.items():
        for kind, value in state.items():
            if kind == "exp_avg":
                found = ours.read(name, kind).view(value.shape)
            else:
                found = ours.whole_states[name][kind]
            torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(value), rtol=1e-4, atol=1e-7)


def run_flat(rank: int, world: int, kind: str, root: str) -> list[float]:
    return run_saving(rank, world, kind, 2, root, FLAT)


def test_adafactor_on_flat_shards_by_choice(tmp_path: Path) -> None:
    """As in DeepSpeed: its states are then per element, and fit any number of ranks, including one."""
    expected = run_ranks(run_flat, 2, 2, "Adafactor", str(tmp_path))[0]
    assert "exp_avg_sq" in open_checkpoint(tmp_path).states()
    assert run_ranks(run_resumed, 2, 2, "Adafactor", [(str(tmp_path), 2, FLAT)])[0][0] == expected
    for world in (1, 3):  # clipping is per shard, so that different shards take different steps
        found = run_ranks(run_resumed, world, world, "Adafactor", [(str(tmp_path), 2, FLAT)])[0][0]
        assert found == pytest.approx(expected, rel=0.5)
    with pytest.raises(AssertionError, match=r"holds the optimizer states exp_avg_sq; Adafactor has exp_avg_sq_row"):
        run_ranks(run_resumed, 2, 2, "Adafactor", [(str(tmp_path), 2, {})])


def test_states_of_flat_shards_that_fit_nothing_else(tmp_path: Path) -> None:
    """The first save failed, after the training was done. Now such states are saved, and fit the same layout."""
    expected = run_ranks(run_flat, 2, 2, "Blockwise", str(tmp_path))
    found = run_ranks(run_resumed, 2, 2, "Blockwise", [(str(tmp_path), 2, FLAT)])
    assert [losses for (losses,) in found] == expected
    with pytest.raises(AssertionError, match=r"on flat shards of 2 ranks, and[\s\S]*whole_tensors"):
        run_ranks(run_resumed, 3, 3, "Blockwise", [(str(tmp_path), 2, FLAT)])
    with pytest.raises(AssertionError, match=r"only fit the flat shards they were saved from"):
        run_ranks(run_resumed, 2, 2, "Blockwise", [(str(tmp_path), 2, WHOLE)])


def test_another_optimizer_is_told(tmp_path: Path) -> None:
    run_ranks(run_saving, 2, 2, "Adafactor", 1, str(tmp_path), {})
    with pytest.raises(AssertionError, match=r"holds optimizer states of whole tensors, and AdamW updates"):
        run_ranks(run_resumed, 2, 2, "AdamW amsgrad", [(str(tmp_path), 1, {})])
    with pytest.raises(AssertionError, match=r"Adafactor has row_var, col_var, variance of whole tensors"):
        run_ranks(run_resumed, 2, 2, "Adafactor of torch", [(str(tmp_path), 1, {})])


def test_slices_of_ranks_are_put_together_or_missed() -> None:
    """Slices may come in any order; errors for missing or wrong parts name the file."""
    whole = torch.arange(12.0).view(3, 4)
    parts = [StateSlice((3, 4), 5, whole.view(-1)[5:]), StateSlice((3, 4), 0, whole.view(-1)[:5])]
    empty = StateSlice((3, 4), 12, whole.view(-1)[12:])
    files = [
        (Path(f"rank{i}"), for_file({0: {"row": part, "step": 3}}, ["w"])) for i, part in enumerate([*parts, empty])
    ]
    found = merged(files)["w"]
    assert torch.equal(found["row"], whole) and found["step"] == 3
    with pytest.raises(CheckpointError, match="parts of 'row' of 'w' are missing"):
        merged(files[:1])
    with pytest.raises(CheckpointError, match="parts of 'row' of 'w' are missing"):
        merged([*files, files[0]])
    with pytest.raises(CheckpointError, match="rank7.*holds a list instead of states of whole tensors"):
        merged([*files, (Path("rank7"), [])])
    files[0][1]["w"]["row"]["start"] = "5"
    with pytest.raises(CheckpointError, match="rank0.*'row' of 'w' is not a part of a tensor"):
        merged(files)
