"""Shared by the stage 3 tests: a config that partitions everything, a Trainer, whole weights, the plain reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, default_data_collator

from tests.support.models import VOCABULARY, Batch, stack, token_rows
from tests.support.ranks import run_each
from tests.support.reference import LossFunction, Recipe, Trace, assert_same_numbers, model_loss, train

STAGE = 3
RATE = 1e-3
EPS = 1e-6
TOLERANCE = 1e-5
# A gradient that is zero except for rounding moves its weight by noise / EPS of an update: allow a hundredth of one.
ABSOLUTE = 1e-2 * RATE
WIDTH = 9
RECIPE = Recipe(learning_rate=RATE, eps=EPS)


def zero_section(**more: Any) -> dict[str, Any]:
    """Nothing is persistent, little is prefetched, little stays gathered."""
    small = {"reduce_bucket_size": 8000, "stage3_prefetch_bucket_size": 4000, "stage3_max_live_parameters": 20000}
    return {"stage": STAGE, **small, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, **more}


def ds_config(*, optimizer: bool = True, **more: Any) -> dict[str, Any]:
    """For plain scripts; `more` is added to the ZeRO section."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero_section(**more),
    }
    if optimizer:
        adam = {"lr": RATE, "eps": EPS, "weight_decay": 0.0, "torch_adam": True}
        config["optimizer"] = {"type": "AdamW", "params": adam}
    return config


def auto_config(**more: Any) -> dict[str, Any]:
    """For Trainer."""
    autos = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    return {**dict.fromkeys(autos, "auto"), "zero_optimization": zero_section(**more)}


def engine_of(model: nn.Module, **more: Any) -> Any:
    """An engine that trains the model's trainable parameters."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=ds_config(**more))
    return engine


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the whole parameters. Collective."""
    named = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: value.detach().clone() for name, value in named.items()}


def train_engine(
    engine: Any, batches: Iterable[Batch], loss_function: LossFunction = model_loss
) -> tuple[list[float], list[float]]:
    """One update per batch; returns this rank's losses and the global norms."""
    losses, norms = [], []
    for batch in batches:
        loss = loss_function(engine, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(float(engine.get_global_grad_norm()))
    return losses, norms


Seen = tuple[list[float], list[float], dict[str, Tensor]]


Build = Callable[[], nn.Module]
Parts = Callable[[], list[list[Batch]]]  # [step][rank]


def run_training(
    rank: int, build: Build, parts: Parts, loss_function: LossFunction = model_loss, limits: Mapping[str, int] = {}
) -> Seen:
    """This rank's observations of a training: losses, norms, final weights."""
    model = build()
    engine = engine_of(model, **limits)
    losses, norms = train_engine(engine, [step[rank] for step in parts()], loss_function)
    return losses, norms, whole(model)


def assert_trains_as_plain(
    build: Build,
    parts: Parts,
    loss_function: LossFunction = model_loss,
    limits: Sequence[Mapping[str, int]] = ({},),
) -> None:
    """As many ranks as a step has batches train as one process, with each of the limits.

    The timeout is short: ranks that wait for each other wait until it ends.
    """
    trace = plain(build(), parts(), loss_function)
    cases = [(build, parts, loss_function, each) for each in limits]
    for seen in run_each(run_training, len(parts()[0]), cases, timeout_s=60):
        assert_same_training(seen, trace)


def plain(model: nn.Module, parts: Sequence[Sequence[Batch]], loss_function: LossFunction = model_loss) -> Trace:
    """Trains in one process; `parts[step]` are the batches of the ranks in that step."""
    return train(model, parts, RECIPE, loss_function)


def assert_same_training(seen: Sequence[Seen], trace: Trace) -> None:
    """Losses, norms and weights of all ranks equal those of one process."""
    losses = [sum(values) / len(seen) for values in zip(*(run[0] for run in seen), strict=True)]
    assert_same_numbers(losses, trace.losses, TOLERANCE, "losses")
    for _, norms, weights in seen:
        assert_same_numbers(norms, trace.norms, TOLERANCE, "gradient norms")
        assert_same_tensors(weights, {name: trace.weights[name] for name in weights})


def assert_same_tensors(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """All tensors are within the tolerances; the message names the tensor."""
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            tensors[name], value, rtol=TOLERANCE, atol=ABSOLUTE, msg=lambda text, name=name: f"{name}: {text}"
        )


def arguments(folder: Path | str, config: dict[str, Any], **options: Any) -> TrainingArguments:
    """TrainingArguments of a short run on the CPU."""
    given: dict[str, Any] = {"max_steps": 3, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    given |= {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    given |= {"learning_rate": RATE, "adam_epsilon": EPS, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    return TrainingArguments(output_dir=str(folder), deepspeed=config, **{**given, **options})


def trainer_of(model: Any, training: TrainingArguments, rows: int = 24) -> Trainer:
    """A Trainer on rows of tokens."""
    data: Any = token_rows(rows)
    return Trainer(
        model=model, args=training, train_dataset=data, eval_dataset=data, data_collator=default_data_collator
    )


def vectors(steps: int, world: int = 2, seed: int = 3) -> list[list[Batch]]:
    """`[step][rank]`: four vectors each."""
    generator = torch.Generator().manual_seed(seed)
    return [[{"x": torch.randn(4, WIDTH, generator=generator)} for _ in range(world)] for _ in range(steps)]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """The same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return make()


def rank_batches(steps: int, world: int = 2, rows: int = 4, limit: int = VOCABULARY) -> list[list[Batch]]:
    """`[step][rank]`: rows without ignored labels, tokens below `limit`."""
    all_rows = token_rows(steps * world * rows)
    tokens = [{"input_ids": [t % limit for t in row["input_ids"]]} for row in all_rows]
    labelled = [{**row, "labels": row["input_ids"]} for row in tokens]
    batches = [stack(labelled[start : start + rows]) for start in range(0, len(labelled), rows)]
    return [batches[step * world : (step + 1) * world] for step in range(steps)]
