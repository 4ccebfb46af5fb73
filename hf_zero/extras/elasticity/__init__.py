"""Elasticity: one batch size that is compatible with as many numbers of ranks as possible.

This module defines the config section `elasticity`, its rule, and the resulting batch sizes for a number of ranks.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_zero.config.errors import ABSENT, Edit, Problem
from hf_zero.config.features import BatchSizesOfExtra, Extra, OwnSection
from hf_zero.config.pipeline import typed
from hf_zero.config.rules import Ranks
from hf_zero.config.schema.batch import MICRO, STEPS, TRAIN, BatchPolicy
from hf_zero.config.schema.fields import Count, Flag, Positive, PositiveNumber, Section, ignored, supported
from hf_zero.log import logger

# A batch size B is compatible with w ranks if some micro-batch m divides B and w divides B / m. Like versions 0.1 and
# 0.2 of DeepSpeed's elasticity, we choose among few candidates: a micro-batch, or the least common multiple of all,
# times a highly composite number. Version 0.2 counts nodes of g ranks; other numbers of ranks get their own batch.


# Numbers with more divisors than every smaller one.
_HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120, 20160),
    *(25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400, 665280, 720720),
)


_VERSIONS = (0.1, 0.2)


class Elasticity(Section):
    """A batch size for many numbers of ranks (docs/elasticity.md)."""

    enabled: Flag = supported(False, "Compute the three batch sizes from this section and the number of ranks.")
    max_train_batch_size: Positive | None = supported(None, "Maximum samples per update.", unit="samples")
    micro_batch_sizes: list[Positive] | None = supported(None, "Allowed micro-batches.", unit="samples")
    min_gpus: Positive = supported(1, "Minimum number of ranks.")
    max_gpus: Positive = supported(10000, "Maximum number of ranks.")
    min_time: Count = ignored(0, "For a scheduler.", why="it is not used, as in DeepSpeed", unit="minutes")
    version: PositiveNumber = supported(0.2, "0.1: any number of ranks; 0.2: whole nodes.")
    prefer_larger_batch: Flag = supported(True, "Prefer the larger of equally good batch sizes.")
    ignore_non_elastic_batch_info: Flag = supported(False, "Ignore batch sizes outside of the section.")
    num_gpus_per_node: Positive = supported(1, "0.2: ranks that are added and removed together.")
    model_parallel_size: Positive = supported(1, "0.2: ranks per model.")

    @property
    def by_nodes(self) -> bool:
        """Whether ranks are added and removed in nodes of `num_gpus_per_node`."""
        return self.version == _VERSIONS[1]

    @property
    def most(self) -> int:
        return self.max_train_batch_size or 0

    @property
    def micros(self) -> list[int]:
        return self.micro_batch_sizes or []


@dataclass(frozen=True, slots=True)
class ElasticBatch:
    """The batch size of a job.

    Attributes:
        batch: samples per update.
        counts: compatible numbers of data-parallel ranks, ascending.
        micro: samples per forward for the given number of ranks; None if no number was given.
    """

    batch: int
    counts: tuple[int, ...]
    micro: int | None = None


class ElasticProblem(ValueError):
    """The rule has no batch size; `key` is the key of the section to change."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def elastic_batch(rule: Elasticity, ranks: int | None = None) -> ElasticBatch:
    """The batch size of a job, and its micro-batch for `ranks` ranks (data-parallel ranks times model_parallel_size).

    Raises:
        ElasticProblem: if there is none.
    """
    if max(rule.micros) > rule.most:
        raise ElasticProblem("micro_batch_sizes", f"{max(rule.micros)} is more than max_train_batch_size = {rule.most}")
    if not rule.by_nodes:
        chosen = _best(rule, rule.most, rule.min_gpus, rule.max_gpus)
        return chosen if ranks is None else ElasticBatch(chosen.batch, chosen.counts, _micro(rule, chosen, ranks))
    if rule.num_gpus_per_node % rule.model_parallel_size:
        raise ElasticProblem(
            "model_parallel_size",
            f"num_gpus_per_node = {rule.num_gpus_per_node} is not a multiple of {rule.model_parallel_size}",
        )
    return _by_nodes(rule, ranks)


def _by_nodes(rule: Elasticity, ranks: int | None) -> ElasticBatch:
    data_ranks = rule.num_gpus_per_node // rule.model_parallel_size  # of one node
    of_node = rule.most // data_ranks
    if max(rule.micros) > of_node:
        raise ElasticProblem(
            "micro_batch_sizes",
            f"{max(rule.micros)} on each of a node's {data_ranks} data-parallel ranks is more than "
            f"max_train_batch_size = {rule.most}",
        )
    nodes = _best(rule, of_node, rule.min_gpus // rule.num_gpus_per_node, rule.max_gpus // rule.num_gpus_per_node)
    chosen = ElasticBatch(nodes.batch * data_ranks, tuple(count * data_ranks for count in nodes.counts))
    if ranks is None:
        return chosen
    mine = ranks // rule.model_parallel_size
    if mine in chosen.counts:
        return ElasticBatch(chosen.batch, chosen.counts, _micro(rule, chosen, mine))
    # Other numbers of ranks use the largest batch size up to the maximum that is a multiple of their number.
    mine = ranks * data_ranks // rule.num_gpus_per_node
    batches = [rule.most // (micro * mine) * micro * mine for micro in rule.micros] if mine else [0]
    batch = max(batches) if rule.prefer_larger_batch else min(batches)
    if not batch:
        raise ElasticProblem(
            "max_train_batch_size", f"{ranks} ranks need more than {rule.most} samples, one micro-batch each"
        )
    own = ElasticBatch(batch, (mine,))
    return ElasticBatch(batch, own.counts, _micro(rule, own, mine))


def _best(rule: Elasticity, max_batch: int, min_count: int, max_count: int) -> ElasticBatch:
    micros, least = rule.micros, min(rule.micros)
    low, high = min_count or 1, max_count or max_batch // least
    bases = [*micros, math.lcm(*micros)]
    # The order of equally good candidates does not matter: a larger (smaller) batch size always replaces the best.
    best, counts = least, tuple[int, ...]()
    for batch in sorted({_grown(base, max_batch) for base in bases if base <= max_batch}):
        dividing = valid_counts(batch, micros, low, high)
        better = batch > best if rule.prefer_larger_batch else batch < best
        if len(dividing) > len(counts) or (len(dividing) == len(counts) and better):
            best, counts = batch, dividing
    return ElasticBatch(best, counts)


def _grown(base: int, max_batch: int) -> int:
    """`base` times the largest highly composite number that fits."""
    return base * max(number for number in _HIGHLY_COMPOSITE if number <= max_batch // base)


def valid_counts(batch: int, micros: Iterable[int], low: int, high: int) -> tuple[int, ...]:
    """All numbers of ranks from `low` to `high` over which a batch can be divided evenly in micro-batches."""
    numbers: set[int] = set()
    for most in (batch // micro for micro in micros if batch % micro == 0):
        small = [divisor for divisor in range(1, math.isqrt(most) + 1) if most % divisor == 0]
        numbers |= {*small, *(most // divisor for divisor in small)}
    return tuple(sorted(count for count in numbers if low <= count <= high))


def _micro(rule: Elasticity, chosen: ElasticBatch, count: int) -> int:
    """The largest micro-batch for a compatible number of ranks."""
    if count not in chosen.counts:
        raise ElasticProblem(
            "elasticity",
            f"{count} ranks are not compatible with the batch size {chosen.batch}; valid: {_shown(chosen.counts)}",
        )
    fitting = [micro for micro in rule.micros if chosen.batch // count % micro == 0]
    return max(fitting)


def _shown(counts: Sequence[int]) -> str:
    text = ", ".join(map(str, counts[:20])) or "none from min_gpus to max_gpus"
    return text if len(counts) <= 20 else f"{text}, ... ({len(counts)} of them)"


# deepspeed.elasticity: functions for schedulers and scripts.


_OLDEST = (0, 3, 8)


class ElasticityError(Exception):
    """Base class of errors in elasticity."""


class ElasticityConfigError(ElasticityError):
    """The section is missing, disabled or invalid."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch size is not compatible with this number of ranks."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the config has the section and enables it."""
    return bool((ds_config.get("elasticity") or {}).get("enabled", False))


def compute_elastic_config(
    ds_config: dict[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int | None]:
    """The batch size of a job, the compatible numbers of data-parallel ranks and, if requested, the micro-batch.

    Args:
        target_deepspeed_version: at least 0.3.8.
        world_size: number of ranks; 0: unknown, for which version 0.2 uses the environment's WORLD_SIZE.

    Raises:
        ValueError: if the config is not a dict, or a micro-batch exceeds the maximum batch size.
        ElasticityConfigError: if the section is missing, disabled or invalid.
        ElasticityIncompatibleWorldSize: if the batch size is not compatible with this number of ranks.
        ElasticityError: for an older version of DeepSpeed, or if model_parallel_size does not divide a node's ranks.
    """
    rule = _rule(ds_config)
    version = tuple(int(number) for number in re.findall(r"\d+", target_deepspeed_version)[:3])
    if version < _OLDEST:
        raise ElasticityError(f"target_deepspeed_version={target_deepspeed_version!r}: elasticity needs at least 0.3.8")
    ranks = world_size or (_world_size() if rule.by_nodes else None)
    try:
        chosen = elastic_batch(rule, ranks)
    except ElasticProblem as error:
        kinds = {"elasticity": ElasticityIncompatibleWorldSize, "micro_batch_sizes": ValueError}
        raise kinds.get(error.key, ElasticityError)(f"elasticity: {error}") from None
    if not world_size and not return_microbatch:
        return chosen.batch, list(chosen.counts)
    micro = chosen.micro
    if micro is None:  # the number of ranks is unknown: use the largest possible one
        micro = max((m for m in rule.micros if chosen.batch % m == 0), default=None)
    return chosen.batch, list(chosen.counts), micro


def _rule(ds_config: object) -> Elasticity:
    if not isinstance(ds_config, dict):
        raise ValueError(f"compute_elastic_config({type(ds_config).__name__}): the config must be a dict")
    if "elasticity" not in ds_config:
        raise ElasticityConfigError('the config has no "elasticity" section')
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError('elasticity is disabled: set "enabled": true in its section')
    return _checked(ds_config["elasticity"])


def _checked(section: object) -> Elasticity:
    draft = typed({"elasticity": section})
    checked = draft.config.section(Elasticity)
    problems = draft.problems() or tuple(_section_problems(checked))
    if problems:
        raise ElasticityConfigError("; ".join(map(str, problems)))
    return checked


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isdecimal() or not int(text):
        raise ElasticityConfigError(
            f"elasticity 0.2 needs the number of ranks: give world_size=, or set WORLD_SIZE (it is {text!r})"
        )
    return int(text)


def ensure_immutable_elastic_config(runtime_elastic_config_dict: dict[str, Any]) -> None:
    """Check that the scheduler's section in DEEPSPEED_ELASTICITY_CONFIG gives the same batch sizes as this one.

    Raises:
        ElasticityConfigError: if it does not.
    """
    if SCHEDULERS not in os.environ:
        logger.warning("%s is not set: the scheduler may choose incompatible numbers of ranks", SCHEDULERS)
        return
    problems = list(scheduler_problems(_checked(runtime_elastic_config_dict)))
    if problems:
        raise ElasticityConfigError("; ".join(map(str, problems)))


# Variable with the section that a scheduler uses to choose numbers of ranks.
SCHEDULERS = "DEEPSPEED_ELASTICITY_CONFIG"


def _section_problems(section: Elasticity) -> Iterator[Problem]:
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        value = getattr(section, name)
        if not value:
            rule = "must be given if elasticity is enabled"
            yield Problem(f"elasticity.{name}", ABSENT if value is None else value, rule, "see docs/elasticity.md")
    if section.version not in _VERSIONS:
        yield Problem("elasticity.version", section.version, "must be 0.1 or 0.2", "0.2 counts in whole nodes")
    elif section.model_parallel_size > 1 and section.version != _VERSIONS[1]:
        rule = "needs version 0.2"
        name, edit = "elasticity.model_parallel_size", Edit.at("elasticity.version", _VERSIONS[1])
        yield Problem(name, section.model_parallel_size, rule, "set version to 0.2", edit=edit)
    if section.min_gpus > section.max_gpus:
        rule = f"is more than max_gpus = {section.max_gpus}"
        yield Problem("elasticity.min_gpus", section.min_gpus, rule, "swap them")


def scheduler_problems(rule: Elasticity) -> Iterator[Problem]:
    """Differences between the scheduler's section and the config's that affect the batch size."""
    seen = os.environ.get(SCHEDULERS)
    if seen is None:
        return
    fix = f"give both one section, or unset {SCHEDULERS}"
    try:
        theirs = Elasticity.model_validate({"enabled": True, **json.loads(seen)})
    except (ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        yield Problem("elasticity", seen, f"{SCHEDULERS} must hold the section as JSON ({reason})", fix)
        return
    problems = list(_section_problems(theirs))
    yield from problems
    for name in ("max_train_batch_size", "micro_batch_sizes", "version") if not problems else ():
        ours, their = getattr(rule, name), getattr(theirs, name)
        if ours != their:
            yield Problem(f"elasticity.{name}", ours, f"{SCHEDULERS}, set by the scheduler, says {their}", fix)


def elastic_sizes(config: Any, ranks: Ranks) -> BatchSizesOfExtra | None:
    """The batch sizes of a job. Explicit sizes that differ are problems."""
    section: Elasticity | None = config.elasticity
    data_ranks = ranks.data_ranks
    if section is None or not section.enabled:
        return None
    problems = list(_section_problems(section))
    is_complete = not problems
    if section.model_parallel_size > 1:
        why = "not available in training: ranks of a tensor group are those of tensor_parallel.autotp_size"
        name, edit = "elasticity.model_parallel_size", Edit.at("elasticity.model_parallel_size", 1)
        problems.append(Problem(name, section.model_parallel_size, why, "write 1", edit=edit))
    problems += scheduler_problems(section) if is_complete else ()
    if problems:
        return BatchSizesOfExtra(problems=tuple(problems))
    try:
        chosen = elastic_batch(section, data_ranks)
    except ElasticProblem as error:
        paths = ", ".join(f"elasticity.{key}" if key != "elasticity" else key for key in error.key.split(", "))
        fix = "start a compatible number of ranks, or change the section"
        return BatchSizesOfExtra(problems=(Problem(paths, section.model_dump(exclude_unset=True), str(error), fix),))
    assert chosen.micro is not None, "asked for a number of ranks"
    sizes = BatchPolicy(
        train_batch_size=chosen.batch * ranks.tensor_size,
        micro_batch_size=chosen.micro,
        accumulation_steps=chosen.batch // (chosen.micro * data_ranks),
    )
    if section.ignore_non_elastic_batch_info:
        return BatchSizesOfExtra(sizes)
    return BatchSizesOfExtra(sizes, tuple(_contradictions(config, sizes, ranks)))


def _contradictions(config: Any, sizes: BatchPolicy, ranks: Ranks) -> Iterator[Problem]:
    elastic = {TRAIN: sizes.train_batch_size, MICRO: sizes.micro_batch_size, STEPS: sizes.accumulation_steps}
    for name, value in elastic.items():
        given = getattr(config, name)
        if given is not None and given != value and ranks.is_written(name):
            rule = f"elasticity makes it {value} for this number of ranks"
            fix = (
                "remove it (your own DataLoader needs the sizes of compute_elastic_config), or set "
                "elasticity.ignore_non_elastic_batch_info to true"
            )
            yield Problem(name, given, rule, fix, edit=Edit((name,)))


EXTRA = Extra(
    name="elasticity",
    sections=(
        OwnSection(
            path="elasticity", kind=Elasticity, doc="Batch sizes for many numbers of ranks (docs/elasticity.md)."
        ),
    ),
    sizes=elastic_sizes,
)
