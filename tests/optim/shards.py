"""Optimizers on given gradients in one process: alone, and on flat shards of several ranks, each with its updater."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.layout import Interval, Piece
from hf_zero.optim.traits import adopt_masters, traits_of, updater_for
from hf_zero.optim.updater import MasterTensor, Peers, Spread, StepGradients, SubGroup

PATIENCE_S = 30.0


class Sum:
    """Sums values of the ranks' threads, like an all-reduce."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=PATIENCE_S)
        self._brought: list[Tensor] = []
        self._lock = threading.Lock()

    def __call__(self, values: Tensor) -> None:
        with self._lock:
            self._brought.append(values.clone())
        self._barrier.wait()
        values.copy_(torch.stack(self._brought).sum(dim=0))
        if self._barrier.wait() == 0:
            self._brought = []
        self._barrier.wait()


def shard_of(rank: int, world: int, sizes: Sequence[int], flat: Tensor, lp_param: Tensor | None) -> SubGroup:
    """A rank's equal part of `flat`, which contains parameters of these sizes one after the other."""
    length = flat.numel() // world
    assert length * world == flat.numel()
    mine = Interval(rank * length, (rank + 1) * length)
    pieces, start = [], 0
    for index, size in enumerate(sizes):
        common = Interval(start, start + size).intersect(mine)
        if common is not None:
            pieces.append(Piece(index, common.start - mine.start, common.start - start, common.numel))
        start += size
    master = flat.narrow(0, mine.start, length).clone()
    return SubGroup(
        bucket=0,
        part=Interval(0, length),
        group=0,
        master=master,
        lp_param=None if lp_param is None else lp_param.narrow(0, mine.start, length),
        tensors=(MasterTensor(nn.Parameter(master), Interval(0, length)),),
        pieces=tuple(pieces),
    )


def run_alone(
    kind: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    weights: Sequence[Tensor],
    steps: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """The weights after the optimizer's own updates with `steps` (gradients by step and parameter)."""
    parameters = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = kind(parameters, **options)
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def run_sharded(
    kind: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
    weights: Sequence[Tensor],
    steps: Sequence[Sequence[Tensor]],
    world: int,
) -> list[Tensor]:
    """The same on `world` ranks."""
    sizes = [weight.numel() for weight in weights]
    padding = -sum(sizes) % world
    flat = torch.cat([weight.reshape(-1) for weight in weights] + [torch.zeros(padding)])
    add_up = Sum(world)
    results: list[Tensor | None] = [None] * world

    def gather(shard: SubGroup, values: Tensor) -> dict[int, Tensor]:
        whole = torch.zeros(flat.numel())
        whole.narrow(0, ranks[threading.get_ident()] * shard.part.numel, shard.part.numel).copy_(values)
        add_up(whole)
        parts = whole[: sum(sizes)].split(sizes)
        return {index: part.view(weights[index].shape) for index, part in enumerate(parts)}

    def scatter(shard: SubGroup, wholes: Mapping[int, Tensor]) -> Tensor:
        whole = torch.zeros(flat.numel())
        for part, index in zip(whole[: sum(sizes)].split(sizes), range(len(sizes)), strict=True):
            if index in wholes:
                part.copy_(wholes[index].reshape(-1))
        add_up(whole)
        return whole.narrow(0, ranks[threading.get_ident()] * shard.part.numel, shard.part.numel)

    def spread() -> list[Spread]:
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        cuts = [rank * (flat.numel() // world) for rank in range(1, world)]
        return [
            Spread(tuple(weight.shape), tuple(cut - start for cut in cuts if start < cut < stop))
            for weight, start, stop in zip(weights, ends, ends[1:], strict=False)
        ]

    ranks: dict[int, int] = {}

    def run(rank: int) -> None:
        ranks[threading.get_ident()] = rank
        shard = shard_of(rank, world, sizes, flat, None)
        optimizer = kind([nn.Parameter(weight.clone()) for weight in weights], **options)
        adopt_masters(optimizer, [shard], optimizer.param_groups)
        peers = Peers(rank, world, add_up, gather, scatter, lambda _: range(len(sizes)), spread)
        updater = updater_for(optimizer, [shard], peers if world > 1 else None)
        assert type(updater).__name__ != "WholeStepUpdater"
        for gradients in steps:
            whole = torch.cat([gradient.reshape(-1) for gradient in gradients] + [torch.zeros(padding)])
            mine = whole.narrow(0, rank * shard.part.numel, shard.part.numel)
            inputs = StepGradients(lambda _, own=mine * 4: own, frozenset(range(len(sizes))), 0.25, [shard])
            assert list(updater.step(inputs)) == [shard]
        results[rank] = shard.master

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    done = torch.cat([result for result in results if result is not None])
    parts = done[: sum(sizes)].split(sizes)
    return [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]


def runs_natively(optimizer: torch.optim.Optimizer) -> bool:
    """Whether one of our updaters replaces `optimizer.step` everywhere."""
    return not traits_of(optimizer).keeps_shapes
