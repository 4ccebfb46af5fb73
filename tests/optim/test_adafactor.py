"""Adafactor of transformers and torch on shards that divide rows and matrices: the same as on whole tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

from hf_zero.layout import Interval, Piece
from hf_zero.layout.matrices import MatrixShape, MatrixSlice
from hf_zero.optim.adafactor import AdafactorUpdater, Sums, Table, TorchFlavour, TransformersFlavour, flavour_of
from hf_zero.optim.traits import Sees, adopt_masters, traits_of, updater_for
from hf_zero.optim.updater import MasterTensor, Peers, Spread, StepGradients, SubGroup
from tests.optim.shards import run_alone, run_sharded

STEPS = 12
SHAPES = [(7, 5), (5,), (4, 9), (), (3, 2, 4), (2, 3, 3, 2), (1, 6), (6, 1)]
MANUAL = {"scale_parameter": False, "relative_step": False}
OPTIONS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "as Trainer has it": (Adafactor, {"lr": 1e-2, **MANUAL}),
    "relative": (Adafactor, {}),
    "warm-up": (Adafactor, {"warmup_init": True}),
    "scaled": (Adafactor, {"lr": 1e-2, "scale_parameter": True, "relative_step": False}),
    "momentum": (Adafactor, {"lr": 1e-2, **MANUAL, "beta1": 0.9}),
    "decay": (Adafactor, {"weight_decay": 0.1, "decay_rate": -0.6, "beta1": 0.5}),
    "clip": (Adafactor, {"lr": 1e-2, **MANUAL, "clip_threshold": 0.3, "eps": (1e-20, 1e-2)}),
    "torch": (torch.optim.Adafactor, {"lr": 1e-2}),
    "torch, all": (
        torch.optim.Adafactor,
        {"lr": 0.05, "weight_decay": 0.1, "beta2_decay": -0.5, "eps": (1e-3, 0.1), "d": 1.5, "maximize": True},
    ),
}


def made_up() -> tuple[list[Tensor], list[list[Tensor]]]:
    """Some rows and columns never get a gradient, as in an embedding."""
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(shape, generator=generator) for shape in SHAPES]
    steps = [
        [torch.randn(shape, generator=generator) * 10.0 ** (-i) for i, shape in enumerate(SHAPES)] for _ in range(STEPS)
    ]
    for gradients in steps:
        gradients[0][2] = 0.0
        gradients[2][:, 3] = 0.0
    return weights, steps


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("name", OPTIONS)
def test_on_shards_as_alone(name: str, world: int) -> None:
    run = (*OPTIONS[name], *made_up())
    for ours, theirs in zip(run_sharded(*run, world), run_alone(*run), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6)


def test_which_classes_are_meant() -> None:
    class Mine(Adafactor):  # may behave differently
        pass

    parameters = [nn.Parameter(torch.ones(2, 2))]
    watched = Adafactor(parameters)
    watched.register_step_post_hook(lambda *_: None)
    assert isinstance(flavour_of(Adafactor(parameters)), TransformersFlavour)
    assert isinstance(flavour_of(torch.optim.Adafactor(parameters)), TorchFlavour)
    assert flavour_of(Mine(parameters)) is None and flavour_of(torch.optim.SGD(parameters)) is None
    assert traits_of(Adafactor(parameters)).sees is Sees.SHARDS_AND_PEERS
    assert traits_of(Mine(parameters)).sees is traits_of(watched).sees is Sees.WHOLE_TENSORS
    for kind in (Adafactor, Mine):
        assert traits_of(kind(parameters), "flat_shards").sees is Sees.FLAT_SHARDS


def test_only_what_is_cut_travels() -> None:
    """Rows and matrices inside a part belong to no other rank; a matrix that is whole on one rank sends nothing."""
    spread = [Spread((4, 6), (8, 16)), Spread((5, 3), ()), Spread((7,), (3,)), Spread((4, 2, 3), (6, 13))]
    # One number per parameter; rows 1 and 2 and all columns of the first; a row and a matrix of the last.
    assert Table(spread).numel == 4 + (2 + 6) + (1 + 3)


def test_sums_of_parts_come_together_in_the_table() -> None:
    shape, cuts = (3, 4, 5), (7, 20, 33)
    spread = [Spread(shape, cuts)]
    squares, table = torch.rand(shape).double(), Table(spread)
    parts = []
    for start, stop in zip((0, *cuts), (*cuts, 60), strict=True):
        part = Sums.zeros(MatrixSlice(MatrixShape(*shape), start, stop), torch.float64, torch.device("cpu"))
        middle = (start + stop) // 2
        part.add(0, squares.view(-1)[start:middle])
        part.add(middle - start, squares.view(-1)[middle:stop])
        parts.append(part)
    message = torch.zeros(table.numel, dtype=torch.float64)
    for part in parts:
        one = torch.zeros_like(message)
        table.write(one, 0, part)
        message += one
    for part in parts:
        table.read(message, 0, part)
        rows = squares.sum(-1).view(-1)[part.of.first_row : part.of.first_row + part.of.num_rows]
        columns = squares.sum(1)[part.of.first_batch : part.of.first_batch + part.of.num_batches]
        torch.testing.assert_close(part.rows, rows)
        torch.testing.assert_close(part.columns, columns)


def test_a_learning_rate_is_asked_for() -> None:
    rule = TransformersFlavour().rule
    group = {**Adafactor([nn.Parameter(torch.ones(1))]).defaults, "relative_step": False}
    with pytest.raises(ValueError, match=r"lr=None, relative_step=False\) has no learning rate"):
        rule(group, 1, torch.ones(()))


def test_the_state_dict_of_a_rank_holds_everything() -> None:
    """`ZeroOptimizer.state_dict` is the optimizer's own; it must restore rows and columns, too."""

    def made() -> AdafactorUpdater:
        torch.manual_seed(0)
        master = torch.randn(12)
        tensor = MasterTensor(nn.Parameter(master), Interval(0, 12))
        shard = SubGroup(0, Interval(0, 12), 0, master, None, (tensor,), (Piece(0, 0, 0, 12),))
        optimizer = Adafactor([nn.Parameter(torch.zeros(3, 4))], beta1=0.9)
        adopt_masters(optimizer, [shard], optimizer.param_groups)
        nothing: Any = None
        peers = Peers(0, 1, lambda _: None, nothing, nothing, nothing, lambda: [Spread((3, 4), ())])
        updater = updater_for(optimizer, [shard], peers)
        assert isinstance(updater, AdafactorUpdater)
        return updater

    def step(updater: AdafactorUpdater, seed: int) -> Tensor:
        gradient = torch.randn(12, generator=torch.Generator().manual_seed(seed))
        list(updater.step(StepGradients(lambda _: gradient, frozenset([0]), 1.0, updater.sub_groups)))
        return updater.sub_groups[0].master.clone()

    first, second = made(), made()
    step(first, 1)
    second.sub_groups[0].master.copy_(first.sub_groups[0].master)
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.state_replaced()
    assert torch.equal(step(first, 2), step(second, 2))
