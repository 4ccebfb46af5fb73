"""The way of a config: six stages, in one order, each a function from one draft to the next.

    read -> rename -> fill -> validate -> rules -> policies

`load_config` reads. A config that transformers or accelerate fill takes the other stages with each call of `examine`,
and `hosts.write_back` writes to their dict what `fill` has found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hf_zero.config.draft import Draft
from hf_zero.config.errors import ConfigError, Problem
from hf_zero.config.extras import extra_named
from hf_zero.config.fill import fill
from hf_zero.config.policies import Findings, Resolved, decide, resolved
from hf_zero.config.rename import rename
from hf_zero.config.rules import apply_rules, ranks_of
from hf_zero.config.schema.zero import GROUP_KEYS, InitPolicy, init_of
from hf_zero.config.validate import validate
from hf_zero.config.views import AcceleratorView, ModelView, TrainingView, Views


def examine(raw: Mapping[str, object], views: Views, *, complete: bool = True) -> Findings:
    """Take a config through all stages, and return everything that there is to say about it.

    Args:
        complete: whether all values are known. Otherwise an unfilled "auto" is not a problem.

    Raises:
        ConfigError: the config is not a dict, or there is no such number of ranks.
    """
    _check_call(raw, views.world_size)
    draft = typed(raw, views)
    ranks = ranks_of(draft, is_complete=complete)
    return decide(apply_rules(draft, ranks), ranks)


def typed(raw: Mapping[str, object], views: Views | None = None) -> Draft:
    """Take a config, which may lack values, through the stages before the rules."""
    return validate(fill(rename(raw, views or Views(world_size=1))))


def _check_call(raw: object, world_size: object) -> None:
    if not isinstance(raw, Mapping):
        raise ConfigError(Problem("config", raw, "must be a dict", "load files and text with load_config first"))
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(Problem("world_size", world_size, "must be the number of ranks", "give an int of at least 1"))


def resolve(
    raw: Mapping[str, object],
    training_args: TrainingView | None = None,
    accelerator_view: AcceleratorView | None = None,
    model: ModelView | None = None,
    *,
    world_size: int,
    host_sizes: tuple[int, ...] = (),
    sequence_size: int | None = None,
    tensor_size: int | None = None,
) -> Resolved:
    """Resolve a config: fill in every open value and validate the result.

    Args:
        raw: the config as a dict. If it comes from `load_config`, messages name file and line.
        training_args: TrainingArguments, if there is a Trainer.
        accelerator_view: the values from a launcher, an Accelerator and the objects given to `prepare`.
        model: the model, for sizes that depend on it.
        world_size: the number of ranks.
        host_sizes: the number of ranks of each host, if known.
        sequence_size: the number of ranks that share a sequence, from an mpu or a mesh; default: the config's key.
        tensor_size: the tensor-parallel size, if a program sets it; default: the config's key.

    Raises:
        ConfigError: the config is invalid; lists all problems.
    """
    views = Views(
        world_size=world_size,
        host_sizes=host_sizes,
        training=training_args,
        accelerator=accelerator_view,
        model=model,
        sequence_size=sequence_size,
        tensor_size=tensor_size,
    )
    return resolved(examine(raw, views), raw)


def resolve_for_init(raw: Mapping[str, object], world_size: int, host_sizes: tuple[int, ...]) -> InitPolicy:
    """Return the policy for building a model, from a config that may have unfilled autos.

    Raises:
        ConfigError: errors in dtypes and shard groups. Others are reported when all values are known.
    """
    findings = examine(raw, Views(world_size=world_size, host_sizes=host_sizes), complete=False)
    _raise_those_of(findings, lambda path: path in GROUP_KEYS or path.startswith(("bf16", "fp16", "data_types")))
    return init_of(findings.config)


def resolve_extra(raw: Mapping[str, object], name: str) -> Any:
    """Return the policy of one of our extras, from a config that may have unfilled autos (before Trainer fills them),
    or None if the config does not use the extra.

    Raises:
        ConfigError: its sections have problems.
        ExtraMissing: it is not installed.
    """
    findings = examine(raw, Views(world_size=1), complete=False)
    paths = tuple(section.path for section in extra_named(name).sections)
    _raise_those_of(findings, lambda path: path.startswith(paths))
    return findings.extras.get(name)


def _raise_those_of(findings: Findings, concerns: Callable[[str], bool]) -> None:
    problems = [problem for problem in findings.problems if concerns(problem.path)]
    if problems:
        raise ConfigError(problems)
