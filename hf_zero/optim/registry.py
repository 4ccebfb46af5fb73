"""Builds an optimizer from ds.json's optimizer section, and checks that it fits the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_zero.config import ConfigError, OptimizerPolicy, Problem
from hf_zero.config.extras import loaded, optimizer_type
from hf_zero.optim.traits import Traits, family_of
from hf_zero.precision import Precision


def build_optimizer(
    policy: OptimizerPolicy, groups: Sequence[dict[str, Any]], names: Mapping[int, str] | None = None
) -> torch.optim.Optimizer:
    """Build the optimizer described by `optimizer.type` and `optimizer.params` of ds.json.

    Args:
        names: parameter id -> name in the model, by which Muon recognises embeddings.

    Raises:
        ConfigError: for an unknown type, or parameters that it does not take.
    """
    kind = optimizer_type(policy.type)
    factory = _maker(policy.type, kind.made_by if kind is not None else "")
    params = dict(policy.params) if kind is None else kind.passed(policy.params)
    if hasattr(factory, "groups_for"):
        groups = factory.groups_for(groups, names or {})
    try:
        return factory(list(groups), **params)
    except (TypeError, ValueError) as error:
        fix = f"give only what {policy.type} takes"
        raise ConfigError(
            Problem("optimizer.params", dict(policy.params), str(error), fix, raises=TypeError)
        ) from error


def _maker(name: str, made_by: str) -> Callable[..., torch.optim.Optimizer]:
    """The callable at `made_by`, which an older torch may lack."""
    if made_by and not (made_by.startswith("torch.optim:") and not hasattr(torch.optim, made_by.partition(":")[2])):
        maker: Callable[..., torch.optim.Optimizer] = loaded(made_by)
        return maker
    rule = "it is neither one of our optimizers nor a class of torch.optim"
    fix = 'write the class name exactly as torch.optim spells it, for example "SGD"'
    words = "is not a supported DeepSpeed Optimizer"
    raise ConfigError(Problem("optimizer.type", name, rule, fix, raises=AssertionError, words=words))


def states_per_element(optimizer: torch.optim.Optimizer) -> int:
    """Number of state values per element; a guess (Adam's two) for unknown optimizers."""
    if type(optimizer).__name__ == "Adafactor":  # rows and columns are few; transformers' may have a momentum
        return int(optimizer.param_groups[0].get("beta1") is not None)
    family = family_of(optimizer)
    if family is None:
        return 2
    return sum(family.form_of(name) is None for name in family.state_names(optimizer.param_groups[0]))


def stored_bytes_per_element(optimizer: torch.optim.Optimizer) -> float:
    """Bytes per element of the states with their own storage format."""
    family, many = family_of(optimizer), 1 << 20
    forms = [] if family is None else [family.form_of(name) for name in family.state_names(optimizer.param_groups[0])]
    return sum(form.stored_numel(many) * form.dtype.itemsize for form in forms if form is not None) / many


def refuse_unfit(optimizer: torch.optim.Optimizer, traits: Traits, stage: int, num_replicas: int = 1) -> None:
    """Raise ConfigError if the optimizer cannot work at `stage`, with replicas of its shards, or with an engine at
    all."""
    name = type(optimizer).__name__
    if traits.unmet is not None:
        rule, fix = f"needs {traits.unmet}, which the engine's step lacks", "use another one, AdamW for example"
        raise ConfigError([Problem("optimizer", name, rule, fix)])
    if stage > traits.highest_stage:
        rule, fix = f"{name} works at stages up to {traits.highest_stage}", f"use {traits.highest_stage}"
        raise ConfigError([Problem("zero_optimization.stage", stage, rule, fix)])
    if num_replicas > 1 and traits.highest_stage < 3:
        rule = "it averages by itself, over all ranks"
        raise ConfigError([Problem("optimizer", name, rule, "shard over all ranks (hf_zero.shard_group unset)")])


def suit_precision(optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """Set the optimizer's state dtype for 16-bit masters. Call after `adopt_masters`.

    Raises:
        ConfigError: if the optimizer would compute its update in 16 bits.
    """
    if precision.low_precision_masters:
        path = f"{precision.model_name}.{precision.model_name}_master_weights_and_grads"
        keep_states_in(optimizer, None if precision.low_precision_states else torch.float32, path)


def keep_states_in(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None, path: str) -> None:
    """Set the optimizer's state dtype (None: the masters' dtype), as the key at `path` requires.

    Raises:
        ConfigError: if the optimizer would compute its update in 16 bits.
    """
    family, name = family_of(optimizer), type(optimizer).__name__
    if family is None:
        rule = f"{name} computes in the dtype of its masters and states, and 16 bits are too few for that"
        fix = "use Adam, AdamW, Lion, Adagrad or SGD, which compute in fp32 whatever they keep, or remove the key"
        raise ConfigError([Problem(path, True, rule, fix)])
    optimizer.state_dtype = dtype  # type: ignore[attr-defined]
    for state in optimizer.state.values():  # some optimizers create it in their constructor
        for kind in filter(lambda kind: family.form_of(kind) is None, family.state_names(optimizer.param_groups[0])):
            state[kind] = state[kind].to(dtype or state[kind].dtype)
