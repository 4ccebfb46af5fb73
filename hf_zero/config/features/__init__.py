"""Declarations of features: their keys of ds.json, the rules for them, and the function that creates the feature.

Each feature of the core has a file in this folder with its keys (sections, which the engine reads through
`Resolved.section(kind)`), `examine`, and an `Extra` that `Root.features` lists. Rarely used features do the same in
packages of their own (`hf_zero.config.extras`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_zero.config.choices.optimizer_types import OptimizerType
    from hf_zero.config.errors import Problem, Remark
    from hf_zero.config.policies import BatchPolicy
    from hf_zero.config.schema.fields import Section
    from hf_zero.config.schema.root import Root


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSection:
    """A section of ds.json; `path` is a top-level key or `hf_zero.KEY`."""

    path: str
    kind: type[Section]
    doc: str


@dataclass(slots=True)
class Examined:
    """Findings about a feature's sections; the policy is None if they are off or have problems."""

    problems: list[Problem] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    policy: Any = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """The batch sizes of a config whose extra determines them; None if it has problems."""

    batch: BatchPolicy | None = None
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extra:
    """Declaration of a feature of the core or of an extra. It must not import torch.

    Attributes:
        sections: the sections in ds.json; those of the core's features are fields of `Root` and `HfZero`.
        examine: looks at a whole config; a section that is not there, or wrong as a whole, is None. Features are made
            where there is a policy.
        features: "module:function" of model and `Resolved`, which returns a TrainingFeature or None.
        sizes: decides batch sizes by config, number of data ranks, whether the author has written the value at a path,
            and ranks per tensor group; None where the config leaves them alone.
        optimizers: the optimizer types that it adds.
        services: what else the core calls by a name of its own -> "module:function".
    """

    name: str
    sections: tuple[OwnSection, ...] = ()
    examine: Callable[[Root], Examined] | None = None
    features: tuple[str, ...] = ()
    sizes: Callable[[Root, int, Callable[[str], bool], int], Sizes | None] | None = None
    optimizers: tuple[OptimizerType, ...] = ()
    services: Mapping[str, str] = field(default_factory=dict)
