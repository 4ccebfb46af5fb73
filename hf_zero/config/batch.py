"""The three batch sizes: two of them determine the third, and their equation must hold."""

from __future__ import annotations

from collections.abc import Collection

from hf_zero.config.errors import ABSENT, ConfigError, Edit, Problem
from hf_zero.config.policies import BatchPolicy

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def resolve_batch(
    train: int | None,
    micro: int | None,
    steps: int | None,
    *,
    world_size: int,
    sequence_size: int = 1,
    autos: Collection[str] = (),
) -> BatchPolicy:
    """Derive missing (None) batch sizes and check train == micro * steps * data ranks; raises ConfigError.

    Args:
        world_size: the number of all ranks, also with tensor parallelism, as DeepSpeed and Hugging Face count them.
        sequence_size: the number of ranks that share each sequence, which count as one data rank.
    """
    data_ranks, shown = world_size // sequence_size, "world size"
    if sequence_size > 1:
        shown = f"data ranks (world size {world_size} / {sequence_size} per sequence)"
    if train is None and micro is None:
        raise ConfigError(_nothing_given(autos))
    given = {TRAIN: train, MICRO: micro, STEPS: steps}
    if steps is None:
        steps = train // micro // data_ranks if train is not None and micro is not None else 1
    if micro is None:
        assert train is not None
        micro = train // data_ranks // steps
    if train is None:
        train = micro * steps * data_ranks
    if micro < 1 or steps < 1 or train != micro * steps * data_ranks:
        raise ConfigError(_unequal({TRAIN: train, MICRO: micro, STEPS: steps}, given, data_ranks, shown))
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


def _unequal(used: dict[str, int], given: dict[str, int | None], data_ranks: int, shown_ranks: str) -> Problem:
    shown = {name: f"{value} ({name}{'' if given[name] is not None else ', derived'})" for name, value in used.items()}
    product = used[MICRO] * used[STEPS] * data_ranks
    equation = f"{shown[TRAIN]} != {shown[MICRO]} x {shown[STEPS]} x {data_ranks} ({shown_ranks}) = {product}"
    rule = f"{TRAIN} = {MICRO} x {STEPS} x {shown_ranks.partition(' (')[0]} does not hold: {equation}"
    follows = given[MICRO] is not None and given[STEPS] is not None
    edit = Edit((TRAIN,)) if follows else None
    return Problem(TRAIN, used[TRAIN], rule, _advice(used, given, data_ranks, shown_ranks), edit=edit)


def _advice(used: dict[str, int], given: dict[str, int | None], data_ranks: int, shown_ranks: str) -> str:
    micro, steps = given[MICRO], given[STEPS]
    known = {name: value for name, value in given.items() if value is not None and name != TRAIN}
    unit = (micro or 1) * (steps or 1) * data_ranks
    of_ranks = f"{shown_ranks.partition(' (')[0]} {data_ranks}"
    parts = " x ".join([*(f"{name} {value}" for name, value in known.items()), of_ranks])
    if micro is not None and steps is not None:
        return f"remove {TRAIN} (it follows: {unit}), or write {unit}"
    nearest = max(unit, round(used[TRAIN] / unit) * unit)
    return f"give a {TRAIN} that is a multiple of {parts} = {unit}, for example {nearest}"
