"""Stage 3 between hosts: which gathers run ahead, and how often ranks exchange small messages.

A user logged every call of torch.distributed, and the start and end of each of six blocks, on two ranks of different
hosts. The small all-gather by which ranks agree ran ahead, but the weights' own gather only started when the block
already waited for it. None of the five blocks was prefetched, and every unit cost a message.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_zero
from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.api.parameter_access import safe_get_full_fp32_param, safe_set_full_fp32_param
from hf_zero.comm import known_groups, ledger
from hf_zero.comm.cpu import shared_memory
from hf_zero.device.registry import host_runs_ahead
from hf_zero.device.runtime import HOST
from tests.support.models import at_backward
from tests.support.ranks import RankFailure, run_ranks

WIDTH = 8
VICTIM = 1


class Block(nn.Module):
    """Reports when its forward and its backward begin."""

    def __init__(self, number: int, say: Callable[[tuple[str, int]], object]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH + 4 * number)  # every block gathers a different number of elements
        self.number, self.say = number, say

    def forward(self, values: Tensor) -> Tensor:
        self.say(("forward", self.number))
        return at_backward(self.linear(values)[:, :WIDTH].tanh(), lambda: self.say(("backward", self.number)))


class Model(nn.Module):
    def __init__(self, num_blocks: int, say: Callable[[tuple[str, int]], object], is_first_twice: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, say) for number in range(num_blocks))
        self.is_first_twice = is_first_twice

    def forward(self, values: Tensor) -> Tensor:
        if self.is_first_twice:
            values = self.blocks[0](values)
        for block in self.blocks:
            values = block(values)
        return values.square().mean()


def noting(log: list[tuple[str, int]], receive: Callable[..., Any]) -> Callable[..., Any]:
    def irecv(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        log.append(("irecv", tensor.numel()))
        return receive(tensor, *args, **kwargs)

    return irecv


def engine_apart(rank: int, model: nn.Module, zero: dict[str, Any], sections: dict[str, Any] | None = None) -> Any:
    """An engine as on a separate host."""
    limits = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, **limits, **zero},
        **(sections or {}),
    }
    with mock.patch.object(shared_memory, "host_name", lambda: f"host {rank}"):
        return hf_zero.initialize(model=model, config=config)[0]


def run_updates(
    rank: int,
    num_blocks: int,
    zero: dict[str, Any],
    num_updates: int,
    evaluates: tuple[int, ...] = (),
    is_first_twice: bool = False,
) -> list[tuple[list[tuple[str, int]], int, float]]:
    """For every update: the events in order since the end of the previous backward, the number of small messages, and
    the loss."""
    log: list[tuple[str, int]] = []
    found = []
    torch.manual_seed(0)
    engine = engine_apart(rank, Model(num_blocks, log.append, is_first_twice), zero)
    with mock.patch.object(dist, "irecv", noting(log, dist.irecv)):
        for update in range(num_updates):
            generator = torch.Generator().manual_seed(10 * update + rank)
            if update in evaluates:
                with torch.no_grad():
                    engine(torch.zeros(2, WIDTH))
            del log[: log.index(("backward", 0)) + 1 if update else len(log)]
            ledger.reset()
            loss = engine(torch.randn(2, WIDTH, generator=generator))
            engine.backward(loss)
            engine.step()
            log.append(("updated", update))
            counts = {name: tally.calls for (phase, name), tally in ledger.tallies.items() if phase == "control"}
            if host_runs_ahead(HOST):
                counts.pop("all_reduce")  # the sum of squares, among devices: no host waits for it
            small = sum(counts.values())
            found.append((list(log), small, loss.item()))
    return found


def run_all(rank: int) -> dict[str, Any]:
    """Engines one after the other in the same processes."""
    many = {"stage3_max_live_parameters": 10_000, "stage3_prefetch_bucket_size": 3 * (WIDTH + 1) * (WIDTH + 4)}
    return {
        "six blocks": run_updates(rank, 6, {}, 4),
        "four": run_updates(rank, 4, {}, 8),
        "forty": run_updates(rank, 40, {}, 4),
        "many under way": run_updates(rank, 8, many, 4),
        "evaluations": run_updates(rank, 4, {}, 8, (3, 4, 6)),
        "first twice": run_updates(rank, 4, many, 4, is_first_twice=True),
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(run_all, 2)


def gathers_of(log: list[tuple[str, int]]) -> list[int]:
    """Number of elements that a rank receives for each block, in forward's order."""
    return list(dict.fromkeys(numel for what, numel in log if what == "irecv"))


def test_blocks_are_gathered_ahead_in_forward_and_in_backward(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        log, _, _ = of_rank["six blocks"][-1]
        rows = gathers_of(log)
        assert len(rows) == 6
        backward = log[log.index(("forward", 5)) :]
        for number in range(1, 6):
            assert log.index(("irecv", rows[number])) < log.index(("forward", number - 1))
        for number in range(5):
            assert backward.index(("irecv", rows[number])) < backward.index(("backward", number + 1))


def test_four_small_messages_per_update_whatever_the_number_of_layers(found: list[dict[str, Any]]) -> None:
    """They are the ends of forward and backward, the start of backward, and the update."""
    for of_rank in found:
        assert [small for name in ("four", "forty") for _, small, _ in of_rank[name][-2:]] == [4, 4, 4, 4]


def test_many_small_units_are_under_way_at_once(found: list[dict[str, Any]]) -> None:
    """`stage3_prefetch_bucket_size` counts elements in flight, `stage3_max_live_parameters` also those gathered."""
    log, _, _ = found[0]["many under way"][-1]
    begun = log[: log.index(("forward", 0))]
    reduced, *gathered = [numel for what, numel in begun if what == "irecv"]  # the last reduction, of the update before
    assert gathered == gathers_of(log)[:3]  # two ahead of the first: 108 and 144 elements
    assert reduced == gathered[0]


def test_what_forward_begins_with_is_gathered_beside_the_update(found: list[dict[str, Any]]) -> None:
    """One unit if nothing may stay live, two if there is room, and the last reduction, which has as many elements as
    the first block's rows."""
    for of_rank in found:
        for name, num_units in (("six blocks", 1), ("many under way", 2)):
            log, _, _ = of_rank[name][-1]
            rows = gathers_of(log)
            update = len(of_rank[name]) - 2
            assert log[: log.index(("updated", update))] == [("irecv", numel) for numel in (rows[0], *rows[:num_units])]


def test_a_block_that_is_used_twice_in_a_row_is_gathered_once_beside_the_update(found: list[dict[str, Any]]) -> None:
    """A plan that started with one unit twice gathered it twice. The first result was lost, and destroying the engine
    before its next forward raised "asked for first" (in 5 of 1,000 random programs)."""
    for of_rank in found:
        log, _, _ = of_rank["first twice"][-1]
        before = log[: log.index(("updated", 2))]
        beside_update = before[len(before) - before[::-1].index(("backward", 0)) :]
        assert beside_update == [("irecv", gathers_of(log)[0])] * 2  # the last reduction, and the gather


def test_an_evaluation_between_two_updates_changes_nothing(found: list[dict[str, Any]]) -> None:
    """Ranks cannot predict it. The first forward of the evaluation uses the prefetched units, and ranks agree on the
    start of the following passes until these are predictable again."""
    for of_rank in found:
        plain, between = of_rank["four"], of_rank["evaluations"]
        assert [loss for _, _, loss in plain] == [loss for _, _, loss in between]
        # One more for each forward whose start is not predicted: after an evaluation, and in the update after that,
        # because the predicted forward did not come.
        assert [small for _, small, _ in between] == [11, 5, 4, 5, 5, 5, 5, 5]


def write_gathered(engine: Any, _folder: str) -> None:
    weight = engine.module.blocks[0].linear.weight
    with GatheredParameters([weight], modifier_rank=0):
        weight.data.mul_(0.5)


def write_master(engine: Any, _folder: str) -> None:
    weight = engine.module.blocks[0].linear.weight
    safe_set_full_fp32_param(weight, 0.5 * safe_get_full_fp32_param(weight))


def load_earlier(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder)
    step(engine)
    engine.load_checkpoint(folder)


def read_everything(engine: Any, _folder: str) -> None:
    with GatheredParameters(list(engine.module.parameters())):
        pass
    engine.empty_partition_cache()


def evaluate(engine: Any, _folder: str) -> None:
    with torch.no_grad():
        engine(torch.zeros(2, WIDTH))


def step_twice(engine: Any, _folder: str) -> None:
    engine.step()


def evaluate_alone_before_an_update(engine: Any, folder: str) -> None:
    """This rank also starts gathers of a training forward beside the update, for which others may wait at once."""
    engine.backward(engine(torch.ones(2, WIDTH)))
    if dist.get_rank() == 0:
        evaluate(engine, folder)
    engine.step()
    dist.barrier()


BETWEEN = (
    write_gathered,
    write_master,
    load_earlier,
    read_everything,
    evaluate,
    step_twice,
    evaluate_alone_before_an_update,
)


def step(engine: Any) -> float:
    loss = engine(torch.ones(2, WIDTH))
    engine.backward(loss)
    engine.step()
    return loss.item()


def run_between(rank: int, folder: str) -> dict[str, list[list[float]]]:
    """Losses with each of `BETWEEN` after two updates, by the kind of gather order."""
    found: dict[str, list[list[float]]] = {}
    for order in ("planned", "negotiated"):
        found[order] = []
        for act in BETWEEN:
            torch.manual_seed(0)
            engine = engine_apart(rank, Model(3, lambda _: None), {}, {"hf_zero": {"gather_order": order}})
            losses = [step(engine) for _ in range(3)]
            for _ in range(2):
                act(engine, f"{folder}/{order}")
                losses += [step(engine) for _ in range(2)]
            found[order].append(losses)
            engine.destroy()
    return found


def test_what_is_under_way_between_updates_is_never_old(tmp_path: Path) -> None:
    """The first units of the next forward are gathered beside the update, and may change before that forward."""
    for of_rank in run_ranks(run_between, 2, str(tmp_path)):
        assert of_rank["planned"] == of_rank["negotiated"]
        assert len({losses[3] for losses in of_rank["planned"]}) == 3  # as before, halved, updated once more


def run_until_one_dies(rank: int, folder: str, place: tuple[str, int], apart: bool) -> None:
    """In the fourth update the victim is killed at `place`; each rank writes its final message to a file.

    `apart`: no rank can see another rank's process.
    """
    said = Path(folder, f"said-{rank}")
    logging.getLogger("hf_zero").addHandler(logging.FileHandler(said))
    num_begun = 0

    def end(begins: tuple[str, int]) -> None:
        nonlocal num_begun
        num_begun += begins == place
        if rank == VICTIM and num_begun == 4:
            negotiation = engine.module_view.store.coordinator.prefetcher._channel.negotiation
            upcoming = negotiation.upcoming(in_backward=place[0] == "backward", trains=True)
            said.write_text(f"{upcoming.units}")
            os.kill(os.getpid(), signal.SIGKILL)

    machine = mock.patch.object(known_groups, "_place", lambda: f"machine {rank}")
    with machine if apart else nullcontext():
        engine = engine_apart(rank, Model(6, end), {})
        try:
            for _ in range(4):
                engine.backward(engine(torch.ones(2, WIDTH)))
                engine.step()
        except RuntimeError as error:
            sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a program
            raise


@pytest.mark.parametrize("place", [("forward", 2), ("backward", 3)])
def test_a_rank_that_dies_in_the_middle_of_a_plan_is_named(place: tuple[str, int], tmp_path: Path) -> None:
    """Planned gathers exchange no other messages: the other ranks wait for rows in a thread, and gloo only reports
    "connection reset" and a port."""
    with pytest.raises(RankFailure, match=f"rank {VICTIM} of 3 failed first"):
        run_ranks(run_until_one_dies, 3, str(tmp_path), place, False)
    left = {"forward": "(4, 5)", "backward": "(1, 0)"}
    assert (tmp_path / f"said-{VICTIM}").read_text() == left[place[0]]  # of the plan, the next one in flight
    for rank in {0, 1, 2} - {VICTIM}:
        last = (tmp_path / f"said-{rank}").read_text().splitlines()[-1]
        # On a busy machine the other rank may also have ended by then.
        assert "another one has exited: " in last and f"rank {VICTIM} (process" in last


def test_a_rank_that_dies_on_another_machine_is_named(tmp_path: Path) -> None:
    """Its process is not visible, but other ranks that end because of it say so in the job's store."""
    with pytest.raises(RankFailure, match=f"rank {VICTIM} of 3 failed first"):
        with mock.patch("tests.support.ranks.REPORT_S", 8.0):  # time for the survivors to report
            run_ranks(run_until_one_dies, 3, str(tmp_path), ("backward", 3), True)
    for rank in {0, 1, 2} - {VICTIM}:
        last = (tmp_path / f"said-{rank}").read_text().splitlines()[-1]
        assert f"alive: rank {VICTIM} on " in last and last.endswith("has exited, or does not respond")
