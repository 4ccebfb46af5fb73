"""The section `elasticity`: its keys, its rule, and the batch sizes that follow from it and the number of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from hf_zero.config.batch import MICRO, STEPS, TRAIN
from hf_zero.config.errors import ABSENT, Edit, Problem
from hf_zero.config.features import Sizes
from hf_zero.config.policies import BatchPolicy
from hf_zero.config.schema.fields import Count, Flag, Positive, PositiveNumber, Section, ignored, supported
from hf_zero.extras.elasticity.batches import ElasticProblem, ElasticRule, elastic_batch


class Elasticity(Section):
    """A batch size that goes with many numbers of ranks (docs/elasticity.md)."""

    enabled: Flag = supported(False, "The three batch sizes follow from this section and the number of ranks.")
    max_train_batch_size: Positive | None = supported(None, "Samples per update at most.", unit="samples")
    micro_batch_sizes: list[Positive] | None = supported(None, "Samples per forward to choose from.", unit="samples")
    min_gpus: Positive = supported(1, "Ranks at least.")
    max_gpus: Positive = supported(10000, "Ranks at most.")
    min_time: Count = ignored(0, "For a scheduler.", why="nothing reads it, in DeepSpeed neither", unit="minutes")
    version: PositiveNumber = supported(0.2, "0.1: any number of ranks; 0.2: whole nodes.")
    prefer_larger_batch: Flag = supported(True, "Of equally good batch sizes take the larger.")
    ignore_non_elastic_batch_info: Flag = supported(False, "Batch sizes written beside the section do not matter.")
    num_gpus_per_node: Positive = supported(1, "0.2: ranks that come and go together.")
    model_parallel_size: Positive = supported(1, "0.2: ranks per model.")


_VERSIONS = (0.1, 0.2)
# Where a scheduler leaves the section by which it chooses numbers of ranks.
SCHEDULERS = "DEEPSPEED_ELASTICITY_CONFIG"


def rule_of(section: Elasticity) -> tuple[ElasticRule | None, list[Problem]]:
    """The rule that a switched-on section states, or what is wrong with it."""
    problems = list(_section_problems(section))
    if problems:
        return None, problems
    assert section.max_train_batch_size is not None and section.micro_batch_sizes, "asked for above"
    rule = ElasticRule(
        max_batch=section.max_train_batch_size,
        micro_batches=tuple(section.micro_batch_sizes),
        min_ranks=section.min_gpus,
        max_ranks=section.max_gpus,
        prefers_larger=section.prefer_larger_batch,
        by_nodes=section.version == _VERSIONS[1],
        per_node=section.num_gpus_per_node if section.version == _VERSIONS[1] else 1,
        model_ranks=section.model_parallel_size,
    )
    return rule, []


def _section_problems(section: Elasticity) -> Iterator[Problem]:
    for name in ("max_train_batch_size", "micro_batch_sizes"):
        value = getattr(section, name)
        if not value:
            rule = "must be given where elasticity is enabled"
            yield Problem(f"elasticity.{name}", ABSENT if value is None else value, rule, "see docs/elasticity.md")
    if section.version not in _VERSIONS:
        yield Problem("elasticity.version", section.version, "must be 0.1 or 0.2", "0.2 counts in whole nodes")
    elif section.model_parallel_size > 1 and section.version != _VERSIONS[1]:
        rule = "needs version 0.2"
        yield Problem("elasticity.model_parallel_size", section.model_parallel_size, rule, "set version to 0.2")
    if section.min_gpus > section.max_gpus:
        rule = f"is more than max_gpus = {section.max_gpus}"
        yield Problem("elasticity.min_gpus", section.min_gpus, rule, "swap them")


def scheduler_problems(rule: ElasticRule) -> Iterator[Problem]:
    """How the section that a scheduler goes by differs from the config's in what decides the batch."""
    seen = os.environ.get(SCHEDULERS)
    if seen is None:
        return
    fix = f"give both one section, or unset {SCHEDULERS}"
    try:
        scheduled = Elasticity.model_validate({"enabled": True, **json.loads(seen)})
    except (ValueError, TypeError) as error:
        said = str(error).splitlines()[0]
        yield Problem("elasticity", seen, f"{SCHEDULERS} must hold the section as JSON ({said})", fix)
        return
    theirs, problems = rule_of(scheduled)
    if theirs is None:
        yield from problems
        return
    named = {
        "max_train_batch_size": (rule.max_batch, theirs.max_batch),
        "micro_batch_sizes": (list(rule.micro_batches), list(theirs.micro_batches)),
        "version": (_VERSIONS[rule.by_nodes], _VERSIONS[theirs.by_nodes]),
    }
    for name, (ours, their) in named.items():
        if ours != their:
            yield Problem(f"elasticity.{name}", ours, f"{SCHEDULERS}, set by the scheduler, says {their}", fix)


def elastic_sizes(
    config: Any, data_ranks: int, is_written: Callable[[str], bool], tensor_size: int = 1
) -> Sizes | None:
    """The batch sizes of a job of so many ranks that see other samples. A size of the author's own that differs is a
    problem."""
    section: Elasticity | None = config.elasticity
    if section is None or not section.enabled:
        return None
    rule, problems = rule_of(section)
    if section.model_parallel_size > 1:
        fix = "write 1"
        problems.append(
            Problem(
                "elasticity.model_parallel_size",
                section.model_parallel_size,
                "not available in training: ranks of a tensor group are those of tensor_parallel.autotp_size",
                fix,
            )
        )
    problems += [] if rule is None else scheduler_problems(rule)
    if rule is None or problems:
        return Sizes(problems=tuple(problems))
    try:
        found = elastic_batch(rule, data_ranks)
    except ElasticProblem as error:
        paths = ", ".join(f"elasticity.{key}" if key != "elasticity" else key for key in error.key.split(", "))
        fix = "start a number of ranks that goes with it, or change the section"
        return Sizes(problems=(Problem(paths, section.model_dump(exclude_unset=True), str(error), fix),))
    assert found.micro is not None, "asked for a number of ranks"
    sizes = BatchPolicy(
        train_batch_size=found.batch * tensor_size,
        micro_batch_size=found.micro,
        accumulation_steps=found.batch // (found.micro * data_ranks),
    )
    if section.ignore_non_elastic_batch_info:
        return Sizes(sizes)
    return Sizes(sizes, tuple(_contradictions(config, sizes, is_written)))


def _contradictions(config: Any, sizes: BatchPolicy, is_written: Callable[[str], bool]) -> Iterator[Problem]:
    elastic = {TRAIN: sizes.train_batch_size, MICRO: sizes.micro_batch_size, STEPS: sizes.accumulation_steps}
    for name, value in elastic.items():
        given = getattr(config, name)
        if given is not None and given != value and is_written(name):
            rule = f"elasticity makes it {value} for this number of ranks"
            fix = (
                "remove it (a DataLoader of your own needs the sizes of compute_elastic_config), or set "
                "elasticity.ignore_non_elastic_batch_info to true"
            )
            yield Problem(name, given, rule, fix, edit=Edit((name,)))
