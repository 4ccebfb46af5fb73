"""Declarations of features: their keys of ds.json, their policy, and the function that creates the feature.

A feature of the core has a file in `schema/` with its keys (sections, which the engine reads through
`Resolved.section(kind)`), their rules, and an `Extra` that `Root.features` lists. Rarely used features do the same in
packages of their own (`hf_zero.config.extras`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_zero.config.errors import Problem
    from hf_zero.config.rules import AnyRule, Ranks
    from hf_zero.config.schema.batch import BatchPolicy
    from hf_zero.config.schema.fields import Section
    from hf_zero.config.schema.optimizer_types import OptimizerType


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSection:
    """A section of ds.json; `path` is a top-level key or `hf_zero.KEY`."""

    path: str
    kind: type[Section]
    doc: str


@dataclass(frozen=True, slots=True)
class BatchSizesOfExtra:
    """The batch sizes of a config whose extra determines them; None if it has problems."""

    batch: BatchPolicy | None = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extra:
    """Declaration of a feature of the core or of an extra. It must not import torch.

    Attributes:
        sections: the sections in ds.json; those of the core's features are fields of `Root` and `HfZero`.
        rules: rules about several of its sections; those about one are in its class.
        policy: what a config without problems in these sections wants of the feature; None: nothing. The whole config
            is its argument. Features are made where there is a policy.
        features: "module:function" of model and `Resolved`, which returns a TrainingFeature or None.
        sizes: decides batch sizes by config and ranks; None where the config leaves them alone.
        optimizers: the optimizer types that it adds.
        services: what else the core calls by a name of its own -> "module:function".
    """

    name: str
    sections: tuple[OwnSection, ...] = ()
    rules: tuple[AnyRule, ...] = ()
    policy: Callable[[Any], Any] | None = None
    features: tuple[str, ...] = ()
    sizes: Callable[[Any, Ranks], BatchSizesOfExtra | None] | None = None
    optimizers: tuple[OptimizerType, ...] = ()
    services: Mapping[str, str] = field(default_factory=dict)
