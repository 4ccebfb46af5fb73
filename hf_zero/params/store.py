"""The interface of every stage's parameter store to reductions and to the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_zero.comm import Negotiation, Pending
from hf_zero.device.registry import runtime_of
from hf_zero.layout import Bucket, FlatLayout, Interval, ParameterSpec
from hf_zero.offload.placement import Placement, Placements
from hf_zero.offload.sub_group import SubGroup, wait_for_readers

if TYPE_CHECKING:
    from hf_zero.params.sharded_parameter import ShardedParameter
    from hf_zero.params.stand_ins import FirstNan

HANDLE = "hf_zero_shard"  # name of the attribute of a parameter that stage 3 shards
# What shards modules as they are built, of each open context of `zero.Init`; the outermost alone is at work.
ACTIVE: list[Any] = []


def of(parameter: Tensor) -> ShardedParameter | None:
    """The handle of `parameter`; None when it is not sharded."""
    handle = getattr(parameter, HANDLE, None)
    return handle if handle is not None and handle.parameter is parameter else None


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, modules are not sharded as they are built; used by `initialize`."""
    sharders = ACTIVE[:1]
    for sharder in sharders:
        sharder.pause()
    try:
        yield
    finally:
        for sharder in sharders:
            sharder.resume()


@dataclass(frozen=True, slots=True)
class Trained:
    """Trained parameters with their specs, in the order of the layout."""

    parameters: Sequence[nn.Parameter]
    specs: Sequence[ParameterSpec]

    def index_of(self) -> dict[int, int]:
        return {id(parameter): index for index, parameter in enumerate(self.parameters)}


@dataclass(frozen=True, slots=True)
class TrainedBucket:
    """The trained part of one bucket on this rank.

    Attributes:
        owned: the interval of the bucket that this rank updates.
        sub_groups: what the update takes one after the other, in order.
        placement: where what belongs to the bucket is kept.
        parameters: the bucket's parameters, in the order of `bucket.slots`.
        device: where the bucket is reduced and gathered.
        is_persistent: of parameters that stay gathered at stage 3: small ones, which are never quantised.
    """

    bucket: Bucket
    owned: Interval
    sub_groups: tuple[SubGroup, ...]
    placement: Placement
    parameters: tuple[nn.Parameter, ...]
    device: torch.device
    is_persistent: bool = field(default=False, kw_only=True)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return getattr(torch, self.bucket.dtype)  # type: ignore[no-any-return]

    @property
    def has_masters(self) -> bool:
        """Whether masters are separate from weights."""
        return any(sub_group.lp_param is not None for sub_group in self.sub_groups)

    def write_master(self, start: int, values: Tensor) -> None:
        """Overwrite masters from element `start` of the owned interval on; nothing where they are the weights."""
        wait_for_readers()
        written = Interval(start, start + values.numel())
        for sub_group in self.sub_groups:
            common = sub_group.part.intersect(written)
            if common is None or sub_group.lp_param is None:
                continue
            assert sub_group.stored is not None, "a store knows where its masters are"
            with sub_group.stored.master.opened(changes=True) as master:
                target = master.narrow(0, common.start - sub_group.part.start, common.numel)
                target.copy_(values.reshape(-1).narrow(0, common.start - start, common.numel))


class Edits:
    """Writes of the user's into parameters since the last step, where ranks have to agree on them: not below stage 3,
    where all ranks have all parameters."""

    @property
    def mark(self) -> int:
        """A number of a few bits that differs where ranks have written different values."""
        return 0

    def settle(self, *, are_equal: bool) -> None:
        """All ranks know whether their marks are equal. Raises on all of them if not. Collective then."""
        return None

    def num_lost(self) -> Tensor | float:
        """How many writes went where they are lost (0-dim, on the device: reading it would wait)."""
        return 0.0

    def refuse_lost(self) -> None:
        """Raise, naming the parameters, if `num_lost` has counted any. Waits for the device."""
        return None


class ParameterStore(ABC):
    """Holds the weights of an engine in the form its stage demands.

    Attributes:
        layout: of the trained parameters; `layout.specs[i]` describes `parameters[i]`.
        parameters: the model's trained parameters.
        buckets: their buckets, in the order in which gradients are reduced.
        device: where the model runs.
        sub_group_numel: most elements of a bucket that are updated as one; None: whatever it has.
        negotiation: what has to go on while a rank waits for reductions, if anything.
        edits: what ranks have to agree on of what users write.
        first_nan: looks at losses, where parameters have no values between their uses.
    """

    negotiation: Negotiation | None = None
    edits = Edits()
    first_nan: FirstNan | None = None

    def __init__(
        self,
        layout: FlatLayout,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[TrainedBucket],
        placements: Placements,
    ) -> None:
        self.layout = layout
        self.parameters = tuple(parameters)
        self.buckets = tuple(buckets)
        self.device = placements.device
        self.sub_group_numel = placements.sub_group_numel

    @abstractmethod
    def sync_masters(self) -> None:
        """Carry what the user wrote into parameters since the last step over to the masters."""

    @abstractmethod
    def all_gather_params(self, bucket: int) -> Pending:
        """Bring the updated weights of a bucket to where the next forward pass finds them. Collective."""

    def report_progress(self, pass_by: Callable[[int], None]) -> None:
        """Call `pass_by` with how many of the first buckets no gradient is to be expected for any more in a backward,
        where the store knows."""
        return None

    def end_backward(self) -> None:
        """A backward pass has ended on this rank. May be collective."""
        return None

    def prepare_change(self) -> None:
        """Before weights change outside an update. There the host has waited for gradients; here the device may still
        read what lies in host memory, for a forward whose result has not been asked for. Collective."""
        runtime_of(self.device).synchronize()
        self.prepare_update()

    @property
    def num_facts(self) -> int:
        """Integers that every rank can tell all others in `prepare_update`, which meets them all then."""
        return 0

    def end_passes(self) -> None:
        """No forward or backward is under way. May be collective."""
        self.end_backward()

    def prepare_update(self, facts: Sequence[int] = ()) -> Sequence[Sequence[int]]:
        """Weights are about to change: nothing may keep showing old ones. May be collective.

        Args:
            facts: `num_facts` of them, or none.

        Returns:
            Those of every rank.
        """
        return ()

    def updated_first(self) -> Sequence[int]:
        """An update begins: the buckets that go before the others, because the next forward begins with them."""
        return ()

    def gather_beside_update(self, to_update: Set[int]) -> None:
        """Some of `updated_first` have their new weights: gather them, as far as none of `to_update` comes before."""
        return None

    def finish_update(self) -> None:
        """Weights have changed, here at least."""
        return None

    @property
    def is_out_of_order(self) -> bool:
        """Whether this rank uses parameters in another order than the one in which they are gathered."""
        return False

    def settle_order(self, any_out_of_order: bool) -> Sequence[int] | None:
        """All ranks know whether any is out of order; a new order of the buckets where that changes. Collective."""
        return None

    def release(self) -> None:
        """Release the model, which stays usable."""
        return None
