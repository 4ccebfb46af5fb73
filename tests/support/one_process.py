"""Training on several ranks, and the same in one plain process: losses, norms and weights compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from transformers.trainer_pt_utils import LabelSmoother

from hf_zero.sequence.batches import part_of
from tests.support.models import IGNORED, Batch

VOCABULARY, RATE, CLIP, SEED = 67, 0.1, 0.5, 23
Difference = float | tuple[float, ...]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def batches(number: int, size: int = 2, length: int = 12, vocabulary: int = VOCABULARY) -> list[Batch]:
    generator = torch.Generator().manual_seed(11)
    made = []
    for _ in range(number):
        ids = torch.randint(1, vocabulary, (size, length), generator=generator)
        made.append({"input_ids": ids, "labels": ids.clone()})
    return made


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)


@dataclass(frozen=True)
class Trained:
    """Losses by batch (or by update, if they are weighted by tokens), norms by update, and the weights at the end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]

    def then(self, later: Trained) -> Trained:
        """This training, continued."""
        return Trained(self.losses + later.losses, self.norms + later.norms, later.weights)

    def seen_by(self, data_rank: int, data_ranks: int) -> Trained:
        """The same with the losses of one data rank's batches, as `train` deals them."""
        return Trained(self.losses[data_rank::data_ranks], self.norms, self.weights)


def in_one_process(
    model: nn.Module,
    data: Sequence[Batch],
    *,
    data_ranks: int = 1,
    accumulated: int = 1,
    by_tokens: bool = False,
    smoothing: float = 0.0,
    make_optimizer: MakeOptimizer = sgd,
) -> Trained:
    """Plain PyTorch with `accumulated` batches of each of `data_ranks` per update; the last one may have fewer.

    Args:
        by_tokens: weight batches by their tokens, not equally.
        smoothing: of labels, as Trainer does it.
    """
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    losses: list[float] = []
    norms, per_update = [], data_ranks * accumulated
    torch.manual_seed(SEED)
    for start in range(0, len(data), per_update):
        together = data[start : start + per_update]
        tokens = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in together]
        shares = [number / sum(tokens) if by_tokens else 1 / len(together) for number in tokens]
        of_batches = []
        for batch, share in zip(together, shares, strict=True):
            output = model(**batch)
            loss = LabelSmoother(smoothing)(output, batch["labels"], shift_labels=True) if smoothing else output.loss
            (loss * share).backward()
            of_batches.append(loss.item())
        losses += [sum(a * b for a, b in zip(of_batches, shares, strict=True))] if by_tokens else of_batches
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()})


def engine_of(
    model: nn.Module,
    config: dict[str, Any],
    *,
    rank: int = 0,
    in_shards: bool = False,
    make_optimizer: MakeOptimizer = sgd,
    **given: Any,
) -> Any:
    """An engine for a copy of the model.

    Args:
        rank: other ranks than the first start with different values, which must not matter.
        in_shards: the model is as `zero.Init` makes it.
        given: further arguments of `initialize`.
    """
    model = copy.deepcopy(model)
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(rank)
    if in_shards:
        deepspeed.zero.Init(module=model, config_dict_or_path=config)
    return deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config, **given)[0]


def train(engine: Any, data: Sequence[Batch]) -> Trained:
    """`data` is that of all data-parallel ranks, dealt in turns; losses are this rank's."""
    ranks, sample = engine.groups.data, engine.groups.sample
    losses: list[float] = []
    norms = []
    torch.manual_seed(SEED)
    for batch in data[ranks.rank :: ranks.size]:
        if sample.size > 1:
            part = part_of(batch, sample.rank, sample.size)
            own = engine(**part, labels=part["shift_labels"]).loss
            loss = whole_loss(own, part["shift_labels"], engine.get_sequence_parallel_group())
        else:
            loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if len(losses) % engine.gradient_accumulation_steps() == 0:
            norms.append(float(engine.get_global_grad_norm()))
    return Trained(losses, norms, {name: value.clone() for name, value in engine.module_state_dict().items()})


def whole_loss(loss: Tensor, labels: Tensor, group: Any) -> Tensor:
    """The mean over the tokens of all parts of a sequence, as on accelerate's page on sequence parallelism."""
    losses = differentiable.all_gather(loss, group=group)
    counts = differentiable.all_gather((labels != IGNORED).sum(), group=group)
    total = sum(each * number for each, number in zip(losses, counts, strict=True) if number > 0)
    return total / max(1, sum(counts))


def differences(found: Trained, plain: Trained) -> tuple[float, float, float]:
    """The largest difference of a loss, of a norm and of a weight."""
    weights = difference_of_weights(found.weights, plain.weights)
    return _apart(found.losses, plain.losses), _apart(found.norms, plain.norms), weights


def _apart(found: Sequence[float], expected: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(found, expected, strict=True)), default=0.0)


def difference_of_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference of a weight that is expected."""
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def assert_small(by_rank: Iterable[dict[str, Difference]], tolerance: float = 1e-5) -> None:
    """Every difference that a rank has found, by name, is within the tolerance."""
    for found in by_rank:
        large = {name: value for name, value in found.items() if not _is_small(value, tolerance)}
        assert found and not large, f"more than {tolerance}: {large}" if found else "nothing was compared"


def _is_small(value: Difference, tolerance: float) -> bool:
    return all(each <= tolerance for each in (value if isinstance(value, tuple) else (value,)))
