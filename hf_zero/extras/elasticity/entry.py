"""deepspeed.elasticity: what a scheduler or a script asks about an elasticity section."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from hf_zero.config import Problem
from hf_zero.config.validate import validate
from hf_zero.extras.elasticity.batches import ElasticProblem, ElasticRule, elastic_batch
from hf_zero.extras.elasticity.rules import SCHEDULERS, rule_of, scheduler_problems
from hf_zero.log import logger

_OLDEST = (0, 3, 8)


class ElasticityError(Exception):
    """Base of errors in elasticity."""


class ElasticityConfigError(ElasticityError):
    """The section is missing, off or wrong."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The batch does not go with this number of ranks."""


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether the config has the section, switched on."""
    return bool((ds_config.get("elasticity") or {}).get("enabled", False))


def compute_elastic_config(
    ds_config: dict[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int | None]:
    """The batch of a job, the numbers of data-parallel ranks it goes with and, where asked for, the micro-batch.

    Args:
        target_deepspeed_version: at least 0.3.8.
        world_size: ranks; 0: not known. Version 0.2 then takes the environment's WORLD_SIZE.

    Raises:
        ValueError: the config is no dict; a micro-batch is larger than the largest batch.
        ElasticityConfigError: the section is missing, off or wrong.
        ElasticityIncompatibleWorldSize: the batch does not go with this number of ranks.
        ElasticityError: another version of DeepSpeed; a number of ranks per node that the model's does not divide.
    """
    rule = _rule(ds_config)
    version = tuple(int(number) for number in re.findall(r"\d+", target_deepspeed_version)[:3])
    if version < _OLDEST:
        raise ElasticityError(f"target_deepspeed_version={target_deepspeed_version!r}: elasticity begins with 0.3.8")
    ranks = world_size or (_world_size() if rule.by_nodes else None)
    try:
        if rule.by_nodes or not world_size:
            found = elastic_batch(rule, ranks)
        else:
            found = elastic_batch(rule, world_size)
    except ElasticProblem as error:
        raise _raised(error) from None
    if not world_size and not return_microbatch:
        return found.batch, list(found.counts)
    micro = found.micro
    if micro is None:  # no number of ranks is known: the largest that goes with any
        micro = max((m for m in rule.micro_batches if found.batch % m == 0), default=None)
    return found.batch, list(found.counts), micro


def _raised(error: ElasticProblem) -> Exception:
    message = f"elasticity: {error}"
    kinds = {"elasticity": ElasticityIncompatibleWorldSize, "micro_batch_sizes": ValueError}
    return kinds.get(error.key, ElasticityError)(message)


def _rule(ds_config: object) -> ElasticRule:
    if not isinstance(ds_config, dict):
        raise ValueError(f"compute_elastic_config({type(ds_config).__name__}): the config must be a dict")
    if "elasticity" not in ds_config:
        raise ElasticityConfigError('the config has no "elasticity" section')
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError('elasticity is switched off: set "enabled": true in its section')
    return _checked(ds_config["elasticity"])


def _checked(section: object) -> ElasticRule:
    config, found = validate({"elasticity": section})
    problems = [finding for finding in found if isinstance(finding, Problem)]
    rule = None
    if not problems:
        rule, problems = rule_of(vars(config)["elasticity"])
    if rule is None:
        raise ElasticityConfigError("; ".join(map(str, problems)))
    return rule


def _world_size() -> int:
    given = os.environ.get("WORLD_SIZE", "")
    if not given.isdecimal() or not int(given):
        raise ElasticityConfigError(
            f"elasticity 0.2 needs the number of ranks: give world_size=, or set WORLD_SIZE (it is {given!r})"
        )
    return int(given)


def ensure_immutable_elastic_config(runtime_elastic_config_dict: dict[str, Any]) -> None:
    """The section that a scheduler has put into DEEPSPEED_ELASTICITY_CONFIG asks for the same batches as this one.

    Raises:
        ElasticityConfigError: it does not.
    """
    if SCHEDULERS not in os.environ:
        logger.warning("%s is not set: nothing says that a scheduler keeps to these numbers of ranks", SCHEDULERS)
        return
    problems = list(scheduler_problems(_checked(runtime_elastic_config_dict)))
    if problems:
        raise ElasticityConfigError("; ".join(map(str, problems)))
