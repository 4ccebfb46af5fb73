"""Generated combinations of ds.json, TrainingArguments and objects, the same in every run."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SEED, COUNT = 7, 240
MICRO, STEPS, TRAIN = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


@dataclass(frozen=True)
class Combination:
    """One config file and its arguments."""

    config: dict[str, Any]
    arguments: dict[str, Any]
    total_steps: int


def combinations() -> Iterator[Combination]:
    """Different combinations, less than half of which are contradictory."""
    choice = random.Random(SEED)
    for _ in range(COUNT):
        arguments = _arguments(choice)
        yield Combination(_config(choice, arguments), arguments, choice.choice([1, 50, 1000]))


def _arguments(choice: random.Random) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": choice.choice([1, 2, 8]),
        "gradient_accumulation_steps": choice.choice([1, 4]),
        "max_grad_norm": choice.choice([0.0, 0.5, 1.0]),
        "learning_rate": choice.choice([5e-5, 1e-3]),
        "adam_beta2": choice.choice([0.999, 0.95]),
        "adam_epsilon": choice.choice([1e-8, 1e-6]),
        "weight_decay": choice.choice([0.0, 0.1]),
        "bf16": choice.random() < 0.5,
        "warmup_steps": choice.choice([0, 3, 0.1]),
        "save_on_each_node": choice.random() < 0.2,
    }


def _config(choice: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    """Mostly autos and consistent values, sometimes a contradictory one."""

    def pick(right: Any, wrong: Any) -> Any:
        return choice.choices(["auto", right, wrong], [12, 6, 1])[0]

    micro, steps = arguments["per_device_train_batch_size"], arguments["gradient_accumulation_steps"]
    config: dict[str, Any] = {
        MICRO: pick(micro, micro + 1),
        STEPS: pick(float(steps), 3),
        "zero_optimization": _zero(choice),
    }
    if choice.random() < 0.8:
        config[TRAIN] = pick(micro * steps, 7)
    if choice.random() < 0.8:
        config["gradient_clipping"] = pick(arguments["max_grad_norm"], 3.0)
    if choice.random() < 0.7:
        config["bf16"] = {"enabled": pick(arguments["bf16"], not arguments["bf16"])}
    if choice.random() < 0.6:
        config["optimizer"] = {"type": choice.choice(["AdamW", "Adam"]), "params": _adam(pick, choice, arguments)}
    if choice.random() < 0.6:
        config["scheduler"] = _schedule(pick, choice, arguments)
    return copy.deepcopy(config)


def _zero(choice: random.Random) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": choice.choice([0, 1, 2])}
    more = {
        "reduce_bucket_size": ["auto", 5e8, 1000],
        "allgather_bucket_size": [5e8, 2000],
        "overlap_comm": [True, False],
        "contiguous_gradients": [True],
        "stage3_prefetch_bucket_size": [5e7],
        "stage3_gather_16bit_weights_on_model_save": [True, "auto"],
        "offload_optimizer": [{"device": "none"}],
    }
    for key, values in more.items():
        if choice.random() < 0.4:
            zero[key] = choice.choice(values)
    return zero


def _adam(pick: Any, choice: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    values = {
        "lr": pick(arguments["learning_rate"], 0.5),
        "betas": pick([0.9, arguments["adam_beta2"]], [0.5, 0.5]),
        "eps": pick(arguments["adam_epsilon"], 0.1),
        "weight_decay": pick(arguments["weight_decay"], 0.7),
    }
    return {key: value for key, value in values.items() if choice.random() < 0.8}


def _schedule(pick: Any, choice: random.Random, arguments: dict[str, Any]) -> dict[str, Any]:
    params: dict[str, Any] = {
        "warmup_min_lr": choice.choice(["auto", 0]),
        "warmup_max_lr": pick(arguments["learning_rate"], 0.5),
        "warmup_num_steps": choice.choice(["auto"] * 5 + [3]),
    }
    kind = choice.choice(["WarmupLR", "WarmupDecayLR"])
    if kind == "WarmupDecayLR":
        params["total_num_steps"] = choice.choice(["auto"] * 5 + [50])
    return {"type": kind, "params": params}
