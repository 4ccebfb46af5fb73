"""One model trained on a mesh of several dimensions, and in one plain process: losses, norms and weights."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from torch import nn

from hf_zero.sequence.batches import part_of
from tests.sequence.training import whole_loss
from tests.tensor.training import CLIP, RATE, Batch, Trained, batches, in_one_process, model_of


@dataclass(frozen=True)
class Shape:
    """The parallelism of a training.

    Attributes:
        zero: keys of the section zero_optimization.
        own: keys of the section hf_zero.
    """

    tensor: int = 1
    sequence: int = 1
    zero: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)


def engine_of(
    model: nn.Module, shape: Shape, stage: int, mpu: Any = None, accumulated: int = 1, training_data: Any = None
) -> Any:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulated,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage, **shape.zero},
        "tensor_parallel": {"autotp_size": shape.tensor},
        "hf_zero": shape.own,
    }
    if mpu is None:
        config["sequence_parallel_size"] = shape.sequence
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    given = {"mpu": mpu, "training_data": training_data}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config, **given)[0]


def train(engine: Any, data: list[Batch]) -> Trained:
    """`data` is that of all data-parallel ranks, distributed in turns; losses are this rank's."""
    ranks, sample, losses, norms = engine.groups.data, engine.groups.sample, [], []
    for batch in data[ranks.rank :: ranks.size]:
        if sample.size > 1:
            part = part_of(batch, sample.rank, sample.size)
            loss = whole_loss(
                engine(**part, labels=part["shift_labels"]).loss, part, engine.get_sequence_parallel_group()
            )
        else:
            loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if len(losses) % engine.gradient_accumulation_steps() == 0:
            norms.append(float(engine.get_global_grad_norm()))
    return Trained(losses, norms, engine.module_state_dict())


@functools.cache
def plain_run(kind: str, steps: int, together: int) -> Trained:
    """Trains in one process, once for all shapes that a rank compares with it; an update takes `together` batches."""
    return in_one_process(model_of(kind), batches(steps * together), data_ranks=together)


def compare(
    shape: Shape, stage: int, world: int, *, steps: int, kind: str = "llama", accumulated: int = 1, **more: Any
) -> tuple[float, ...]:
    """Largest differences of (a loss, a norm in proportion, a weight)."""
    data_ranks = world // (shape.tensor * shape.sequence)
    data, model = batches(steps * data_ranks * accumulated), model_of(kind)
    plain = plain_run(kind, steps, data_ranks * accumulated)
    engine = engine_of(model, shape, stage, accumulated=accumulated, **more)
    assert engine.groups.data.size == data_ranks and engine.train_batch_size() == 2 * accumulated * (
        world // shape.sequence
    )
    found = train(engine, data)
    own = plain.losses[engine.groups.data.rank :: data_ranks]
    engine.destroy()
    return differences(found, Trained(own, plain.norms, plain.weights))


def differences(found: Trained, plain: Trained) -> tuple[float, ...]:
    return (
        max(abs(a - b) for a, b in zip(found.losses, plain.losses, strict=True)),
        max(abs(a - b) / max(1.0, b) for a, b in zip(found.norms, plain.norms, strict=True)),
        max((found.weights[name] - value).abs().max().item() for name, value in plain.weights.items()),
    )
