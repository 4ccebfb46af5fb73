"""Writes checkpoints of any stage and world size in one process, from full tensors through the writer's pure half."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.deepspeed.states import (
    GroupState,
    ModelWeights,
    OptimizerPart,
    RunState,
    model_states,
    optimizer_states_0,
    optimizer_states_1_2,
    optimizer_states_3,
    ours,
)
from hf_zero.checkpoint.transaction import Destination, write_checkpoint
from hf_zero.layout import chunk_numel
from hf_zero.layout.reshard import Extent, GroupPartition, Member, sub_groups

MOMENTS = ("exp_avg", "exp_avg_sq")


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_GENERATOR)


_GENERATOR = torch.Generator().manual_seed(5)


@dataclass(frozen=True)
class Contents:
    """Full tensors of a model with two groups, a frozen parameter, a tied pair and two buffers."""

    groups: Sequence[dict[str, Tensor]]
    moments: dict[str, dict[str, Tensor]]
    frozen: dict[str, Tensor]
    buffers: dict[str, Tensor]
    shared: dict[str, str]
    client_state: dict[str, Any] = field(default_factory=lambda: {"note": "hello"})

    @property
    def trainable(self) -> dict[str, Tensor]:
        return {name: value for group in self.groups for name, value in group.items()}


def example(dtype: torch.dtype = torch.bfloat16) -> Contents:
    groups = [
        {"embed.weight": _random(19, 12), "mlp.weight": _random(17, 12), "out.weight": _random(12, 17)},
        {"mlp.bias": _random(17), "norm.weight": _random(12), "scale": _random()},
    ]
    trainable = {name: value for group in groups for name, value in group.items()}
    return Contents(
        groups=groups,
        moments={kind: {name: _random(*value.shape).abs() for name, value in trainable.items()} for kind in MOMENTS},
        frozen={"frozen.weight": _random(13, 5).to(dtype), "frozen.bias": _random(5).to(dtype)},
        buffers={"table": _random(2, 3), "count": torch.tensor(7)},
        shared={"head.weight": "embed.weight"},
    )


@dataclass(frozen=True)
class Setting:
    """The setting in which a checkpoint is written."""

    stage: int
    world: int
    dtype: torch.dtype = torch.bfloat16
    sub_group_size: int = 300
    tag: str = "global_step3"

    @property
    def run(self) -> RunState:
        return RunState(
            stage=self.stage,
            world=self.world,
            global_steps=3,
            skipped_steps=1,
            global_samples=24,
            lr_scheduler={"last_batch_iteration": 2},
            config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": self.stage}},
        )


PART = OptimizerPart(
    options=[{"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay} for decay in (0.1, 0.0)],
    overflow=False,
    clip_grad=1.0,
)


def files_of(rank: int, contents: Contents, setting: Setting) -> dict[str, Any]:
    """The files that `rank` writes."""
    return {0: _files_0, 1: _files_1_2, 2: _files_1_2, 3: _files_3}[setting.stage](rank, contents, setting)


def write(root: Path, contents: Contents, setting: Setting, **place: Any) -> Path:
    """Write a checkpoint with one thread per rank; returns the folder of its tag."""
    ranks = ThreadRanks(setting.world)

    def one(rank: int) -> None:
        destination = Destination(root, setting.tag, rank == 0, "", True, setting.stage > 0)
        write_checkpoint(destination, files_of(rank, contents, setting), ranks.rank(rank))

    with ThreadPoolExecutor(setting.world) as pool:
        for done in [pool.submit(one, rank) for rank in range(setting.world)]:
            done.result()
    return root / setting.tag


class ThreadRanks:
    """A world of threads that can gather small objects, which is all that writing needs."""

    def __init__(self, world: int) -> None:
        self._values: list[object] = [None] * world
        self._barrier = Barrier(world, timeout=30)
        self.world = world

    def rank(self, rank: int) -> Any:
        ranks = self

        class Rank:
            world = ranks.world

            def __init__(self) -> None:
                self.rank = rank

            def gather_objects(self, value: object) -> list[object]:
                ranks._values[rank] = value
                ranks._barrier.wait()
                gathered = list(ranks._values)
                ranks._barrier.wait()
                return gathered

        return Rank()


def _weights(contents: Contents, setting: Setting, rank: int) -> ModelWeights:
    sharded = setting.stage == 3
    parameters = {name: value.to(setting.dtype) for name, value in contents.trainable.items()} | contents.frozen
    parameters |= {alias: parameters[owner] for alias, owner in contents.shared.items()}
    module = {name: torch.empty(0, dtype=value.dtype) if sharded else value for name, value in parameters.items()}
    frozen = contents.frozen
    if sharded:
        frozen = {name: _shard(value, rank, setting.world) for name, value in frozen.items()}
    return ModelWeights(
        module={**contents.buffers, **module},
        buffer_names=list(contents.buffers),
        shared=contents.shared if rank == 0 or not sharded else {},
        frozen_shapes={name: tuple(value.shape) for name, value in contents.frozen.items()},
        frozen=frozen,
    )


def _shard(value: Tensor, rank: int, world: int) -> Tensor:
    numel = chunk_numel(value.numel(), world)
    return torch.nn.functional.pad(value.flatten(), (0, numel * world - value.numel()))[rank * numel :][:numel].clone()


def _members(group: dict[str, Tensor], first: int) -> tuple[Member, ...]:
    return tuple(Member(first + index, value.numel()) for index, value in enumerate(group.values()))


def _fill(numel: int, extents: Sequence[Extent], tensors: Sequence[Tensor]) -> Tensor:
    flat = torch.zeros(numel)
    for run in extents:
        flat[run.offset : run.offset + run.numel] = tensors[run.parameter].flatten()[run.start : run.stop]
    return flat


def _files_1_2(rank: int, contents: Contents, setting: Setting) -> dict[str, Any]:
    layouts, states, first = [], [], 0
    trainable = contents.trainable
    for group in contents.groups:
        line = GroupPartition(_members(group, first), setting.world)
        layouts.append(line)
        first += len(group)
        extents, part = line.extents(rank, 0), line.partition_numel
        states.append(
            GroupState(
                master=_fill(part, extents, list(trainable.values()))[: part - line.padding(rank)].clone(),
                moments={k: _fill(part, extents, [v[name] for name in trainable]) for k, v in contents.moments.items()},
                scalars={"step": torch.tensor(3.0)},
            )
        )
    files = {
        ds.optimizer_file(rank, bf16=setting.dtype == torch.bfloat16): optimizer_states_1_2(
            setting.run, rank, PART, list(trainable), layouts, states
        )
    }
    if rank == 0:
        shapes = [{name: tuple(value.shape) for name, value in group.items()} for group in contents.groups]
        files[ds.model_file(0, setting.stage)] = model_states(setting.run, _weights(contents, setting, 0), shapes)
    return _with_client_state(files, contents)


def _files_3(rank: int, contents: Contents, setting: Setting) -> dict[str, Any]:
    subs, numbers, first = [], [], 0
    for group in contents.groups:
        mine = sub_groups(_members(group, first), setting.world, setting.sub_group_size)
        numbers.append(list(range(len(subs), len(subs) + len(mine))))
        subs += mine
        first += len(group)
    trainable = contents.trainable
    names = list(trainable)
    states = [
        GroupState(
            master=_fill(sub.numel, sub.extents(rank, 0), list(trainable.values())),
            moments={
                k: _fill(sub.numel, sub.extents(rank, 0), [v[n] for n in names]) for k, v in contents.moments.items()
            },
            scalars={"step": 3},
        )
        for sub in subs
    ]
    shapes = [{names[m.parameter]: tuple(trainable[names[m.parameter]].shape) for m in sub.members} for sub in subs]
    files = {
        ds.optimizer_file(rank, bf16=setting.dtype == torch.bfloat16): optimizer_states_3(
            setting.run, PART, numbers, states
        ),
        ds.model_file(rank, 3): model_states(setting.run, _weights(contents, setting, rank), shapes),
    }
    return _with_client_state(files, contents)


def _files_0(rank: int, contents: Contents, setting: Setting) -> dict[str, Any]:
    if rank != 0:
        return {}
    states = {
        name: GroupState(value, {kind: contents.moments[kind][name] for kind in MOMENTS}, {"step": 3})
        for name, value in contents.trainable.items()
    }
    shapes = [{name: tuple(value.shape) for name, value in group.items()} for group in contents.groups]
    optimizer = optimizer_states_0(PART, shapes, states, has_masters=setting.dtype != torch.float32)
    model = model_states(setting.run, _weights(contents, setting, 0), shapes, optimizer)
    return _with_client_state({ds.model_file(0, 0): {**model, ds.HF_ZERO: ours(PART)}}, contents)


def _with_client_state(files: dict[str, Any], contents: Contents) -> dict[str, Any]:
    return {name: {**file, **contents.client_state} if ds.MODULE in file else file for name, file in files.items()}


def numel_of(contents: Contents) -> int:
    """Elements of all parameters, tied ones once."""
    return sum(math.prod(value.shape) for value in (*contents.trainable.values(), *contents.frozen.values()))
