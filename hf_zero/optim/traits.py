"""What is known of an optimizer, described once: how it runs on shards, and what it needs for that.

A class of ours says it itself: by `family`, its elementwise rule, or by a method `traits`. Only the class that says so
is meant; one that is derived from it may do something else. What nobody uses is not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from hf_zero.config import OptimizerSees
from hf_zero.config.choices.optimizer_types import type_of_class
from hf_zero.config.extras import loaded
from hf_zero.optim.elementwise import ElementwiseUpdater, Family
from hf_zero.optim.updater import Peers, Ranks, SubGroup, Updater, WholeStepUpdater
from hf_zero.optim.whole_tensors import WholeTensorUpdater

Make = Callable[[Sequence[SubGroup], "Peers | None", "Ranks | None"], Updater]


class Sees(Enum):
    """What an optimizer works on at stages 1 to 3."""

    ELEMENTS = "flat shards, one element at a time"
    SHARDS_AND_PEERS = "flat shards, and asks other ranks for what they lack"
    BUCKETS = "whole buckets: it averages gradients itself"
    FLAT_SHARDS = "flat shards, as itself"
    WHOLE_TENSORS = "whole tensors, as itself"


@dataclass(frozen=True, slots=True)
class Traits:
    """
    Attributes:
        make: an updater of ours that computes exactly what the optimizer's own step would; None: it runs as itself.
        family: its elementwise rule, if it has one.
        highest_stage: the last stage at which it works.
        serves_whole_buckets: whether `make` is also right where a rank owns whole buckets.
        unmet: what it needs and a sharded step does not have.
    """

    sees: Sees
    make: Make | None = None
    family: Family | None = None
    highest_stage: int = 3
    serves_whole_buckets: bool = True
    unmet: str | None = None

    @property
    def cuts(self) -> bool:
        """Whether what a rank owns of a bucket may be updated in sub-groups without changing the result."""
        return self.sees in (Sees.ELEMENTS, Sees.FLAT_SHARDS)

    @property
    def keeps_shapes(self) -> bool:
        """Whether it holds one tensor per parameter, in its own shape, where a rank owns whole buckets."""
        return self.make is None or not self.serves_whole_buckets


def traits_of(optimizer: torch.optim.Optimizer, choice: OptimizerSees | None = None) -> Traits:
    """The description of `optimizer`.

    Args:
        choice: what the config says about optimizers that would run as themselves, and about Adafactor.
    """
    ours = _built_in(optimizer, choice)
    if ours is not None:
        return ours
    known = [found for kind in type(optimizer).__mro__ if (found := type_of_class(kind)) is not None]
    is_whole = choice == "whole_tensors" or choice is None and any(kind.whole_tensors for kind in known)
    unmet = next((kind.needs for kind in known if kind.needs), None)
    return Traits(Sees.WHOLE_TENSORS if is_whole else Sees.FLAT_SHARDS, unmet=unmet)


def runs_natively(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an updater of ours stands in for `optimizer.step` everywhere: it computes exactly the same."""
    return not traits_of(optimizer).keeps_shapes


def holds_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's own step must see one tensor per parameter in its own shape."""
    return traits_of(optimizer).sees is Sees.WHOLE_TENSORS


def family_of(optimizer: torch.optim.Optimizer) -> Family | None:
    """The elementwise rule of this optimizer. Exact classes only: a subclass may do something else."""
    own = vars(type(optimizer)).get("family")
    found = own if isinstance(own, Family) else _stand_in(optimizer)
    return found if isinstance(found, Family) else None


def _stand_in(optimizer: torch.optim.Optimizer) -> Family | Traits | None:
    """How a class that is not ours is run instead of its own step, which nobody watches."""
    kind = type_of_class(type(optimizer))
    if kind is None or not kind.stands_in:
        return None
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return None
    found: Family | Traits | None = loaded(kind.stands_in)(optimizer)
    return found


def updater_for(
    optimizer: torch.optim.Optimizer,
    sub_groups: Sequence[SubGroup],
    peers: Peers | None = None,
    ranks: Ranks | None = None,
    choice: OptimizerSees | None = None,
) -> Updater:
    """An updater of ours where it computes the same, else the optimizer's own step on what it has to see.

    Args:
        peers: the ranks that share the parameters; None where every rank owns whole buckets.
        ranks: all ranks, for the optimizers that exchange gradients themselves.
    """
    traits = traits_of(optimizer, choice)
    if traits.make is not None and (peers is not None or traits.serves_whole_buckets):
        return traits.make(sub_groups, peers, ranks)
    if peers is not None and traits.sees is Sees.WHOLE_TENSORS:
        return WholeTensorUpdater(optimizer, sub_groups, peers)
    return WholeStepUpdater(optimizer, sub_groups)


def _built_in(optimizer: torch.optim.Optimizer, choice: OptimizerSees | None) -> Traits | None:
    """Of the optimizers that run natively at every stage they have."""
    rule = family_of(optimizer)
    if rule is not None:
        return Traits(
            Sees.ELEMENTS,
            lambda sub_groups, peers, ranks: ElementwiseUpdater(optimizer, sub_groups, rule),
            family=rule,
        )
    described: Callable[[torch.optim.Optimizer], Traits] | None = vars(type(optimizer)).get("traits")
    if described is not None:
        return described(optimizer)
    found = _stand_in(optimizer) if choice != "flat_shards" else None
    return found if isinstance(found, Traits) else None
