"""The 1-bit optimizers in float64, for several ranks in one process; and the engine on the same gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero import initialize
from hf_zero.layout import Bucket

SHAPES = [(7, 5), (11,), (3, 2, 4), (1,), (40,)]


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def gradients(rank: int, steps: int) -> Iterator[list[Tensor]]:
    """One rank's gradients by step: its own noise around a common drift that turns slowly."""
    shared = torch.Generator().manual_seed(5)
    drift = [0.3 * torch.randn(shape, generator=shared, dtype=torch.float64) for shape in SHAPES]
    own = torch.Generator().manual_seed(100 + rank)
    for step in range(steps):
        turn = 1.0 if (step // 40) % 2 == 0 else -0.5
        yield [turn * mean + torch.randn(mean.shape, generator=own, dtype=torch.float64) for mean in drift]


class Driven(nn.Module):
    """A module whose loss has given gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList([nn.Parameter(weight) for weight in weights()])

    def forward(self, wanted: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(self.tensors, wanted, strict=True)
        total: Tensor = sum((tensor * grad.to(tensor.dtype)).sum() for tensor, grad in pairs if grad is not None)  # type: ignore[assignment]
        return total


def settings(kind: str, params: dict[str, Any], stage: int, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 60},
        "optimizer": {"type": kind, "params": params},
        **sections,
    }


def start(config: dict[str, Any]) -> Any:
    engine, _, _, _ = initialize(model=Driven(), config=config)
    return engine


def advance(engine: Any, steps: Sequence[Sequence[Tensor | None]]) -> None:
    for wanted in steps:
        engine.backward(engine(wanted))
        engine.step()


def run_engine(rank: int, kind: str, params: dict[str, Any], stage: int, steps: int) -> tuple[list[Tensor], Any]:
    """The final weights, and their positions in buckets."""
    engine = start(settings(kind, params, stage))
    advance(engine, list(gradients(rank, steps)))
    return [tensor.detach().clone() for tensor in engine.module.tensors], engine.optimizer.store.layout.buckets


@dataclass
class Line:
    """One simulated bucket: positions of its tensors, one momentum and one error feedback per rank."""

    bucket: Bucket
    m: list[Tensor]
    v: Tensor
    worker: list[Tensor]
    server: Tensor

    @classmethod
    def of(cls, bucket: Bucket, world: int) -> Line:
        zeros = torch.zeros(bucket.numel, dtype=torch.float64)
        return cls(bucket, [zeros.clone() for _ in range(world)], zeros.clone(), [zeros.clone()] * world, zeros.clone())

    def spans(self) -> list[slice]:
        return [slice(slot.offset, slot.offset + slot.numel) for slot in self.bucket.slots]

    def mean(self, lines: Sequence[Tensor]) -> Tensor:
        """C of the paper: both halves, with a scale per tensor, and in the second half per tensor and chunk."""
        world, total, worker = len(lines), torch.zeros_like(self.server), []
        for line, owed in zip(lines, self.worker, strict=True):
            message = torch.zeros_like(line)
            for span in self.spans():
                message[span] = rounded((line + owed)[span])
            worker.append(torch.where(message == 0, message, line + owed - message))
            total += message / world
        self.worker = worker
        z, result, chunk = total + self.server, torch.zeros_like(total), len(total) // world
        for start in range(0, len(total), chunk):
            for span in self.spans():
                part = slice(max(start, span.start), min(start + chunk, span.stop))
                if part.start < part.stop:
                    result[part] = rounded(z[part])
        self.server = torch.where(result == 0, result, z - result)
        return result


def rounded(values: Tensor) -> Tensor:
    scale = values.norm() / len(values) ** 0.5
    return torch.where(values >= 0, scale, -scale)


class Simulation:
    """All ranks in one process. Weights are flat, one vector per bucket and rank."""

    def __init__(self, buckets: Sequence[Bucket], world: int) -> None:
        self.world = world
        self.lines = [Line.of(bucket, world) for bucket in buckets]
        self.p = [[self.flat(line, weights()) for _ in range(world)] for line in self.lines]

    @staticmethod
    def flat(line: Line, tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.zeros(line.bucket.numel, dtype=torch.float64)
        for slot, span in zip(line.bucket.slots, line.spans(), strict=True):
            flat[span] = tensors[slot.parameter].reshape(-1)
        return flat

    def steps(self, count: int) -> Iterator[tuple[int, list[list[Tensor]]]]:
        """(number of the update, gradients by bucket and rank)."""
        streams = [gradients(rank, count) for rank in range(self.world)]
        for number in range(1, count + 1):
            tensors = [next(stream) for stream in streams]
            yield number, [[self.flat(line, theirs) for theirs in tensors] for line in self.lines]

    def tensors(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for line, p in zip(self.lines, self.p, strict=True):
            for slot, span in zip(line.bucket.slots, line.spans(), strict=True):
                found[slot.parameter] = p[0][span].view(SHAPES[slot.parameter])
        return [found[index] for index in range(len(SHAPES))]


def exact(line: Line, own: Sequence[Tensor], beta1: float, beta2: float) -> None:
    g = torch.stack(list(own)).mean(dim=0)
    line.m = [beta1 * m + (1 - beta1) * g for m in line.m]
    line.v = beta2 * line.v + (1 - beta2) * g * g


def direction(line: Line, m: Tensor, p: Tensor, eps: float, decay: float) -> Tensor:
    return m / (line.v.sqrt() + eps) + decay * p


def one_bit_adam(
    buckets: Sequence[Bucket], world: int, count: int, lr: float, freeze_step: int, weight_decay: float = 0.0
) -> list[Tensor]:
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    run = Simulation(buckets, world)
    for number, own in run.steps(count):
        for index, line in enumerate(run.lines):
            if number <= freeze_step:
                exact(line, own[index], beta1, beta2)
            else:
                mine = [beta1 * m + (1 - beta1) * g for m, g in zip(line.m, own[index], strict=True)]
                line.m = [line.mean(mine) if world > 1 else mine[0]] * world
            run.p[index] = [p - lr * direction(line, line.m[0], p, eps, weight_decay) for p in run.p[index]]
    return run.tensors()


def zero_one_adam(
    buckets: Sequence[Bucket],
    world: int,
    count: int,
    lr: float,
    var_freeze_step: int,
    var_update_scaler: int,
    local_step_scaler: int,
    local_step_clipper: int,
    weight_decay: float = 0.0,
) -> list[Tensor]:
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    run = Simulation(buckets, world)
    k, changes, h, waited = 1, 0, 1, 0
    moved = [[torch.zeros_like(p) for p in ranks] for ranks in run.p]
    rates = 0.0
    for number, own in run.steps(count):
        is_alone = number > var_freeze_step
        if number == var_freeze_step + 1:
            for line in run.lines:
                line.worker, line.server = [torch.zeros_like(line.v)] * world, torch.zeros_like(line.v)
        for index, line in enumerate(run.lines):
            if is_alone:
                line.m = [beta1 * m + (1 - beta1) * g for m, g in zip(line.m, own[index], strict=True)]
            elif number % k == 0:
                exact(line, own[index], beta1, beta2)
            else:
                g = line.mean(own[index])
                line.m = [beta1 * m + (1 - beta1) * g for m in line.m]
            for rank in range(world):
                u = direction(line, line.m[rank], run.p[index][rank], eps, weight_decay)
                run.p[index][rank] = run.p[index][rank] - lr * u
                if is_alone:
                    moved[index][rank] = moved[index][rank] - lr * u
        if not is_alone:
            changes += number % k == 0
            if changes == var_update_scaler and number % k == 0:
                k, changes = 2 * k, 0
            continue
        rates += lr
        if number % h == 0:
            for index, line in enumerate(run.lines):
                root = line.v.sqrt() + eps
                back = [p - b for p, b in zip(run.p[index], moved[index], strict=True)]
                mean = line.mean([b * root for b in moved[index]])
                line.m = [-mean / rates] * world
                run.p[index] = [p + mean / root for p in back]
                moved[index] = [torch.zeros_like(mean)] * world
            rates = 0.0
        waited += 1
        if waited == local_step_scaler:
            h, waited = min(2 * h, local_step_clipper), 0
    return run.tensors()


def one_bit_lamb(
    buckets: Sequence[Bucket],
    world: int,
    count: int,
    lr: float,
    freeze_step: int,
    weight_decay: float = 0.0,
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
) -> list[Tensor]:
    beta1, beta2, eps = 0.9, 0.999, 1e-8
    run = Simulation(buckets, world)
    a, last = dict.fromkeys(range(len(SHAPES)), 0.0), dict.fromkeys(range(len(SHAPES)), 1.0)
    fresh: list[Tensor] = []
    for number, own in run.steps(count):
        if number == freeze_step + 1:
            fresh = [line.v.clone() for line in run.lines]
        for index, line in enumerate(run.lines):
            if number <= freeze_step:
                exact(line, own[index], beta1, beta2)
            else:
                before = line.m[0]
                mine = [beta1 * before + (1 - beta1) * g for g in own[index]]
                line.m = [line.mean(mine) if world > 1 else mine[0]] * world
                shown = (line.m[0] - beta1 * before) / (1 - beta1)
                fresh[index] = beta2 * fresh[index] + (1 - beta2) * shown * shown
            u = direction(line, line.m[0], run.p[index][0], eps, weight_decay)
            new = run.p[index][0].clone()
            for slot, span in zip(line.bucket.slots, line.spans(), strict=True):
                i = slot.parameter
                if number <= freeze_step:
                    ratio = min(max(float(run.p[index][0][span].norm() / u[span].norm()), 0.01), 10.0)
                    a[i] = coeff_beta * a[i] + (1 - coeff_beta) * ratio if ratio != 1.0 else a[i]
                    new[span] -= lr * ratio * u[span]
                    continue
                f = float(((line.v.sqrt() + eps) / (fresh[index].sqrt() + eps))[span].max())
                if weight_decay:
                    alone = direction(line, line.m[0], run.p[index][0], eps, 0.0)
                    share = min(1.0, float(alone[span].norm() / u[span].norm()))
                    f = f * share + 1 - share
                f = min(max(f, factor_min), factor_max)
                last[i] = min(max(f, last[i] * (1 - factor_threshold)), last[i] * (1 + factor_threshold))
                new[span] -= lr * a[i] * last[i] * u[span]
            run.p[index] = [new] * world
    return run.tensors()
