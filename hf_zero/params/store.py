"""The interface of a stage's parameter store to reductions and to the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_zero.comm import Negotiation, Pending
from hf_zero.device.registry import runtime_of
from hf_zero.layout import Bucket, FlatLayout, Interval, ParameterSpec
from hf_zero.offload.placement import Placement, Placements
from hf_zero.offload.sub_group import Context, SubGroup, wait_for_readers

if TYPE_CHECKING:
    from hf_zero.params.sharded_parameter import ShardedParameter
    from hf_zero.params.stand_ins import FirstNan

HANDLE = "hf_zero_shard"  # attribute of a parameter that stage 3 shards
# The sharding rules of each open `zero.Init` context; only the outermost is active.
ACTIVE: list[Any] = []


def of(parameter: Tensor) -> ShardedParameter | None:
    """Return the handle of `parameter`; None if it is not sharded."""
    handle = getattr(parameter, HANDLE, None)
    return handle if handle is not None and handle.parameter is parameter else None


def opened_for_build(handle: ShardedParameter) -> bool:
    """Gather a parameter that is read or written while a model is built under `zero.Init`, where all ranks do the same;
    never one of an engine. Returns whether it is gathered."""
    for sharder in ACTIVE[:1] if handle.owner is None and not handle.is_available else ():
        sharder.open(handle)
    return handle.owner is None and handle.is_available


@contextmanager
def suspended() -> Iterator[None]:
    """Context in which modules are not sharded when they are built; used by `initialize`."""
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


@dataclass(slots=True, eq=False)
class TrainedBucket:
    """The trained part of one bucket on this rank. Only `AutoRatio` replaces its placement.

    Attributes:
        owned: the interval of the bucket that this rank updates.
        sub_groups: the sub-groups, in the order of their updates.
        placement: storage of the bucket's masters, states and gradients.
        parameters: the bucket's parameters, in the order of `bucket.slots`.
        device: the device that reduces and gathers the bucket.
        is_persistent: whether its parameters stay gathered at stage 3; these are never quantized.
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
        """Overwrite masters from element `start` of the owned interval on; no-op if weights are their own masters."""
        wait_for_readers()
        written = Interval(start, start + values.numel())
        for sub_group in self.sub_groups:
            common = sub_group.part.intersect(written)
            if common is None or sub_group.lp_param is None:
                continue
            assert sub_group.stored is not None, "a store has created its masters"
            with sub_group.stored.master.opened(changes=True) as master:
                target = master.narrow(0, common.start - sub_group.part.start, common.numel)
                target.copy_(values.reshape(-1).narrow(0, common.start - start, common.numel))


class Edits:
    """The user's writes into parameters since the last step, on which ranks must agree. Below stage 3, where all ranks
    have all parameters, there is nothing to agree on."""

    @property
    def mark(self) -> int:
        """A small number that differs between ranks that have written different values."""
        return 0

    def commit(self, *, are_equal: bool) -> None:
        """Called when all ranks know whether their marks are equal. If not, raises on all ranks. Collective then."""
        return None

    def num_lost(self) -> Tensor | float:
        """Number of lost writes (0-dim, on the device, because reading it would wait)."""
        return 0.0

    def refuse_lost(self) -> None:
        """Raise an error that names the parameters if any write was lost. Waits for the device."""
        return None


class ParameterStore(ABC):
    """Stores the weights of an engine in the form its stage requires.

    Attributes:
        layout: of the trained parameters; `layout.specs[i]` describes `parameters[i]`.
        parameters: the model's trained parameters.
        buckets: their buckets, in the order of reduction.
        device: the device of the model.
        deferred: what is left of the last update.
        sub_group_numel: maximum number of elements updated together; None: the whole bucket.
        gathers_beside_forward: whether updated weights are gathered beside the next forward, which waits when it reads
            them.
        negotiation: counts reductions, and serves other ranks while this rank waits for them, if needed.
        edits: users' writes on which ranks must agree.
        first_nan: checks losses for NaN, if parameters are released between uses.
    """

    gathers_beside_forward = False
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
        self.deferred = placements.deferred
        self.sub_group_numel = placements.sub_group_numel

    @abstractmethod
    def sync_masters(self) -> None:
        """Copy the user's writes into parameters since the last step to the masters."""

    @abstractmethod
    def all_gather_params(self, bucket: int) -> Pending:
        """Make the updated weights of a bucket available to the next forward pass. Collective."""

    def report_progress(self, pass_by: Callable[[int], None]) -> None:
        """Call `pass_by` with the number of leading buckets for which backward will not produce further gradients, if
        the store knows it."""
        return None

    def prepare_to_wait(self, reduction: int) -> None:
        """Return when this rank may wait for reduction number `reduction` of `negotiation`, because no other rank waits
        for its weights meanwhile."""
        return None

    def explain(self, error: RuntimeError) -> None:
        """Raise an error that names the parameters that `error` of a backward is about, if the store knows them."""
        return None

    def end_backward(self) -> None:
        """End a backward pass on this rank. May be collective."""
        return None

    def prepare_change(self) -> None:
        """Prepare for a change of weights outside an update. Unlike after a backward, the device may still be reading
        host memory for a forward whose result has not been read. Collective."""
        runtime_of(self.device).synchronize()
        self.prepare_update()

    @property
    def num_facts(self) -> int:
        """Number of integers that ranks can exchange in `prepare_update`, if that synchronises all ranks."""
        return 0

    def end_passes(self) -> None:
        """End running passes. May be collective."""
        self.end_backward()

    def prepare_update(self, facts: Sequence[int] = ()) -> Sequence[Sequence[int]]:
        """Prepare for a change of weights: no old values may stay gathered. May be collective.

        Args:
            facts: `num_facts` of them, or none.

        Returns:
            The facts of every rank.
        """
        return ()

    def updated_first(self) -> Sequence[int]:
        """Begin an update. Returns the buckets to update first, because the next forward starts with them."""
        return ()

    def next_use(self, bucket: int) -> int:
        """Position in the next forward from which on the weights of a bucket are read, if known. The same on all
        ranks."""
        return 0

    def may_defer(self, bucket: int) -> bool:
        """Whether the update of a bucket may be deferred (`defer`) until its weights are read. Equal on all ranks."""
        return False

    def may_update_beside(self, bucket: int) -> bool:
        """Whether the device may update a bucket on the update lane, beside the next forward, which reads its weights
        through host memory. Equal on all ranks."""
        return False

    def defer(
        self, updates: Iterator[int], buckets: Collection[int], around: Context, *, on_update_lane: bool = False
    ) -> None:
        """Run the rest of an update up to one of these buckets when its weights are gathered; see `DeferredUpdate`.

        Args:
            on_update_lane: whether that lane runs any part of the update, and so all of the rest.
        """
        raise NotImplementedError

    def gather_beside_update(self, to_update: Set[int]) -> None:
        """Gather those of `updated_first` that are updated, up to the first that is in `to_update`."""
        return None

    def outdate(self, updated: Collection[int]) -> None:
        """Let autograd know that these parameters have new values, so that graphs of earlier ones raise an error."""
        return None

    def finish_update(self) -> None:
        """End an update on this rank."""
        return None

    @property
    def is_out_of_order(self) -> bool:
        """Whether this rank uses parameters in another order than the gather order."""
        return False

    def adopt_order(self, any_out_of_order: bool) -> Sequence[int] | None:
        """Agree on a new order if any rank is out of order. Returns the new order of buckets, if any. Collective."""
        return None

    def release(self) -> None:
        """Release the model, which stays usable."""
        return None
