"""What is known of an optimizer, described once: how it runs on shards, and what it needs for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from hf_zero.config import OptimizerSees
from hf_zero.config.choices.optimizer import highest_stage
from hf_zero.optim import onebit
from hf_zero.optim.adafactor import AdafactorUpdater
from hf_zero.optim.adafactor_flavours import flavour_of
from hf_zero.optim.adagrad import AdagradFamily, DeepSpeedCPUAdagrad
from hf_zero.optim.adam import AdamFamily, DeepSpeedCPUAdam, FusedAdam
from hf_zero.optim.adam8 import Adam8bit, Adam8Family, AdamW8bit
from hf_zero.optim.elementwise import ElementwiseUpdater, Family
from hf_zero.optim.lamb import FusedLamb, LambUpdater
from hf_zero.optim.lion import DeepSpeedCPULion, FusedLion, LionFamily
from hf_zero.optim.muon import Muon, MuonUpdater
from hf_zero.optim.sgd import SgdFamily, has_no_dampening
from hf_zero.optim.updater import Peers, Ranks, SubGroup, Updater, WholeStepUpdater
from hf_zero.optim.whole_tensors import WholeTensorUpdater

# Their update depends on whole matrices, which a flat shard does not have.
WHOLE_TENSOR_NAMES = ("Muon", "Adafactor", "AdaFactor", "Shampoo", "SOAP", "LARS", "Lamb", "LAMB", "FusedLamb")
# These cannot run on masters of any shape: what they need does not reach a sharded step.
_NEEDS = {"LBFGS": "a closure that evaluates the loss again", "SparseAdam": "sparse gradients"}
_ADAM_FLAGS = ("amsgrad", "maximize", "capturable", "differentiable")
_OTHER_FLAGS = ("maximize", "differentiable")

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
    ours = _built_in(optimizer)
    if ours is not None:
        return ours
    sees = Sees.WHOLE_TENSORS if choice == "whole_tensors" else Sees.FLAT_SHARDS
    if choice is None and _needs_whole_tensors(optimizer):
        sees = Sees.WHOLE_TENSORS
    flavour = flavour_of(optimizer)
    if flavour is not None and choice != "flat_shards" and _is_plain(optimizer, ()):

        def adafactor(sub_groups: Sequence[SubGroup], peers: Peers | None, ranks: Ranks | None) -> Updater:
            assert peers is not None, "where a rank has whole tensors Adafactor runs as itself"
            return AdafactorUpdater(optimizer, sub_groups, flavour, peers)

        return Traits(Sees.SHARDS_AND_PEERS, adafactor, serves_whole_buckets=False)
    unmet = next((_NEEDS[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in _NEEDS), None)
    return Traits(sees, unmet=unmet)


def runs_natively(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an updater of ours stands in for `optimizer.step` everywhere: it computes exactly the same."""
    return not traits_of(optimizer).keeps_shapes


def holds_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's own step must see one tensor per parameter in its own shape."""
    return traits_of(optimizer).sees is Sees.WHOLE_TENSORS


def family_of(optimizer: torch.optim.Optimizer) -> Family | None:
    """The elementwise rule of this optimizer. Exact classes only: a subclass may do something else."""
    kind = type(optimizer)
    if kind in (FusedAdam, DeepSpeedCPUAdam):
        return AdamFamily()
    if kind in (AdamW8bit, Adam8bit):
        return Adam8Family()
    if kind in (FusedLion, DeepSpeedCPULion):
        return LionFamily()
    if kind is DeepSpeedCPUAdagrad:
        return DeepSpeedCPUAdagrad.family
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return AdamFamily() if _is_plain(optimizer, _ADAM_FLAGS) else None
    if kind is torch.optim.Adagrad:
        return AdagradFamily("sum") if _is_plain(optimizer, _OTHER_FLAGS) else None
    if kind is torch.optim.SGD:
        return SgdFamily() if _is_plain(optimizer, _OTHER_FLAGS) and has_no_dampening(optimizer) else None
    return None


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


def _built_in(optimizer: torch.optim.Optimizer) -> Traits | None:
    """Of the optimizers that run natively at every stage they have."""
    family = family_of(optimizer)
    if family is not None:
        rule = family
        return Traits(
            Sees.ELEMENTS,
            lambda sub_groups, peers, ranks: ElementwiseUpdater(optimizer, sub_groups, rule),
            family=family,
        )
    if type(optimizer) is FusedLamb:
        return Traits(Sees.SHARDS_AND_PEERS, lambda sub_groups, peers, ranks: LambUpdater(optimizer, sub_groups, peers))
    return _averaging(optimizer) or _muon(optimizer)


def _muon(optimizer: torch.optim.Optimizer) -> Traits | None:
    if type(optimizer) is not Muon:
        return None

    def make(sub_groups: Sequence[SubGroup], peers: Peers | None, ranks: Ranks | None) -> Updater:
        assert peers is not None, "where a rank has whole tensors Muon runs as itself"
        return MuonUpdater(optimizer, sub_groups, peers)

    return Traits(Sees.SHARDS_AND_PEERS, make, serves_whole_buckets=False)


def _averaging(optimizer: torch.optim.Optimizer) -> Traits | None:
    """Of those that average gradients themselves, whole: not every stage has them so."""
    updater = onebit.UPDATERS.get(type(optimizer))
    if updater is None:
        return None

    def make(sub_groups: Sequence[SubGroup], peers: Peers | None, ranks: Ranks | None) -> Updater:
        assert ranks is not None, "who averages needs to know the other ranks"
        return updater(optimizer, sub_groups, ranks)

    return Traits(Sees.BUCKETS, make, highest_stage=highest_stage(type(optimizer).__name__))


def _needs_whole_tensors(optimizer: torch.optim.Optimizer) -> bool:
    return any(ancestor.__name__ in WHOLE_TENSOR_NAMES for ancestor in type(optimizer).__mro__)


def _is_plain(optimizer: torch.optim.Optimizer, flags: tuple[str, ...]) -> bool:
    """Whether nobody watches the optimizer's own step, and none of the flags is set in any group."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    return not any(group.get(flag) for group in optimizer.param_groups for flag in flags)
