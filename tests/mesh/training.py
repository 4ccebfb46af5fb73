"""One model trained on a mesh of several dimensions, and in one plain process: losses, norms and weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tests.support import one_process
from tests.support.one_process import CLIP, Trained, batches, in_one_process, train
from tests.tensor.models import model_of


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
    return one_process.engine_of(model, config, mpu=mpu, training_data=training_data)


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
    found, expected = train(engine, data), plain.seen_by(engine.groups.data.rank, data_ranks)
    engine.destroy()
    return differences(found, expected)


def differences(found: Trained, plain: Trained) -> tuple[float, ...]:
    """The largest difference of a loss, of a norm in proportion to it, and of a weight."""
    loss, _, weight = one_process.differences(found, plain)
    norms = zip(found.norms, plain.norms, strict=True)
    return loss, max(abs(a - b) / max(1.0, b) for a, b in norms), weight
