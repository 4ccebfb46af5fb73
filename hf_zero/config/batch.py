"""The batch triad: two of three numbers give the third, and the equation must hold."""

from __future__ import annotations

from collections.abc import Collection

from hf_zero.config.errors import ABSENT, ConfigError, Edit, Problem
from hf_zero.config.policies import BatchPolicy

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def resolve_batch(
    train: int | None, micro: int | None, steps: int | None, *, world_size: int, autos: Collection[str] = ()
) -> BatchPolicy:
    """Fill what is missing (None) and check train == micro * steps * world_size; raises ConfigError."""
    if train is None and micro is None:
        raise ConfigError(_nothing_given(autos))
    given = {TRAIN: train, MICRO: micro, STEPS: steps}
    if steps is None:
        steps = train // micro // world_size if train is not None and micro is not None else 1
    if micro is None:
        assert train is not None
        micro = train // world_size // steps
    if train is None:
        train = micro * steps * world_size
    if micro < 1 or steps < 1 or train != micro * steps * world_size:
        raise ConfigError(_unequal({TRAIN: train, MICRO: micro, STEPS: steps}, given, world_size))
    return BatchPolicy(train_batch_size=train, micro_batch_size=micro, accumulation_steps=steps)


def _nothing_given(autos: Collection[str]) -> Problem:
    fix = f"give {MICRO} (samples per forward on one rank), or {TRAIN}, as a number"
    if TRAIN in autos or MICRO in autos:
        rule = 'the batch size is "auto", and nothing has filled it in'
        fix = (
            "Trainer fills it from per_device_train_batch_size, Accelerate from the dataloader given to prepare() "
            f"together with the model; otherwise {fix}"
        )
        return Problem(f"{MICRO}, {TRAIN}", "auto", rule, fix)
    return Problem(f"{MICRO}, {TRAIN}", ABSENT, "at least one of the two batch sizes must be given", fix)


def _unequal(used: dict[str, int], given: dict[str, int | None], world_size: int) -> Problem:
    shown = {name: f"{value} ({name}{'' if given[name] is not None else ', derived'})" for name, value in used.items()}
    product = used[MICRO] * used[STEPS] * world_size
    equation = f"{shown[TRAIN]} != {shown[MICRO]} x {shown[STEPS]} x {world_size} (world size) = {product}"
    rule = f"{TRAIN} = {MICRO} x {STEPS} x world size does not hold: {equation}"
    follows = given[MICRO] is not None and given[STEPS] is not None
    edit = Edit((TRAIN,)) if follows else None
    return Problem(TRAIN, used[TRAIN], rule, _advice(used, given, world_size), edit=edit)


def _advice(used: dict[str, int], given: dict[str, int | None], world_size: int) -> str:
    micro, steps = given[MICRO], given[STEPS]
    known = {name: value for name, value in given.items() if value is not None and name != TRAIN}
    unit = (micro or 1) * (steps or 1) * world_size
    parts = " x ".join([*(f"{name} {value}" for name, value in known.items()), f"world size {world_size}"])
    if micro is not None and steps is not None:
        return f"remove {TRAIN} (it follows: {unit}), or write {unit}"
    nearest = max(unit, round(used[TRAIN] / unit) * unit)
    return f"give a {TRAIN} that is a multiple of {parts} = {unit}, for example {nearest}"
