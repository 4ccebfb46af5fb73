"""Creates this rank's files of a checkpoint, in DeepSpeed's layout, from a live training."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_zero.checkpoint.background import Snapshot
from hf_zero.checkpoint.deepspeed import keys as ds
from hf_zero.checkpoint.deepspeed.states import (
    GroupState,
    ModelWeights,
    OptimizerPart,
    RunState,
    model_states,
    optimizer_states_0,
    optimizer_states_1_2,
    optimizer_states_3,
    ours,
)
from hf_zero.checkpoint.deepspeed.tensor_parts import affine_maps
from hf_zero.checkpoint.extra_states import (
    GroupSummary,
    ShardState,
    Stored,
    bound_for_file,
    buffers_of,
    errors_for_file,
    for_file,
    others_for_file,
    parts_by_parameter,
    read_sub_groups,
    summarise,
)
from hf_zero.checkpoint.files.stream import Arriving, Awaited, Streamed
from hf_zero.checkpoint.files.torch_file import plain, why_unreadable
from hf_zero.checkpoint.subject import ModelSubject, Subject
from hf_zero.checkpoint.tensor_ranks import cuts_of
from hf_zero.comm import Collectives, hosts
from hf_zero.comm.parts import held_part, shape_in_files
from hf_zero.layout.reshard import (
    Copy,
    Extent,
    GroupPartition,
    Member,
    SubGroupPartition,
    reshard,
    round_robin,
    sub_groups,
)
from hf_zero.log import logger
from hf_zero.optim.stager import COUNTERS
from hf_zero.optim.updater import WholeStates
from hf_zero.params.consolidation import persistent_buffers, state_dict_order, with_extra_states
from hf_zero.params.sharded_parameter import local_chunk
from hf_zero.params.store import of

# Moves elements between ranks so that each has the contents of its file: carries out the copies of `reshard`.


ROUND_BYTES = 8 << 20  # bytes that a rank sends per round, which fit in the cache


Share = Callable[[Sequence[Tensor], Collectives], Sequence[Sequence[Tensor]]]  # own buffers -> those of each rank


@dataclass(frozen=True, slots=True)
class Placed:
    """Elements and their `offset` in a buffer."""

    offset: int
    values: Tensor


class Exchange:
    """This rank's copies of one resharding; `fill` carries them out for one kind of state."""

    def __init__(self, copies: Sequence[Copy], collectives: Collectives, share: Share | None = None) -> None:
        """`copies`: of all ranks, the same on every rank; `share`: gives access to other ranks' memory, which replaces
        sending."""
        rank = collectives.rank
        self._collectives = collectives
        self._share = share
        self._incoming: list[list[Copy]] = [[] for _ in range(collectives.size)]
        self._outgoing: list[list[Copy]] = [[] for _ in range(collectives.size)]
        between: Counter[tuple[int, int]] = Counter()
        for copy in copies:
            if copy.target_rank == rank:
                self._incoming[copy.source_rank].append(copy)
            if copy.source_rank == rank:
                self._outgoing[copy.target_rank].append(copy)
            if not copy.is_local:
                between[copy.source_rank, copy.target_rank] += copy.numel
        # The maximum that any rank sends to another, which determines the number of rounds of all ranks.
        self._longest = max(between.values(), default=0)

    @property
    def is_local(self) -> bool:
        """Whether no data is sent between ranks."""
        return self._longest == 0

    def fill(self, buffers: Sequence[Tensor]) -> dict[int, list[Placed]]:
        """The pieces of each target buffer with their offsets. Local elements are views of `buffers`. Collective."""
        placed: dict[int, list[Placed]] = defaultdict(list)
        rank = self._collectives.rank

        def place(copies: Sequence[Copy], sources: Sequence[Tensor]) -> None:
            for copy in copies:
                view = sources[copy.source_buffer].narrow(0, copy.source_offset, copy.numel)
                placed[copy.target_buffer].append(Placed(copy.target_offset, view))

        if self._share is not None and not self.is_local:
            for theirs, copies in zip(self._share(buffers, self._collectives), self._incoming, strict=True):
                place(copies, theirs)
            return placed
        place(self._incoming[rank], buffers)
        if not self.is_local:
            for peer, received in enumerate(self._swap(buffers)):
                cursor = 0
                for copy in self._incoming[peer] if peer != rank else ():
                    view = received.narrow(0, cursor, copy.numel)
                    placed[copy.target_buffer].append(Placed(copy.target_offset, view))
                    cursor += copy.numel
        return placed

    def _swap(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Receive every peer's copies for this rank, one after the other.

        Sends in rounds to save memory, because new pages cost as much as copying.
        """
        rank, like = self._collectives.rank, buffers[0]
        received = [
            like.new_empty(0 if peer == rank else sum(copy.numel for copy in copies))
            for peer, copies in enumerate(self._incoming)
        ]
        numel = max(1, ROUND_BYTES // (like.element_size() * self._collectives.size))
        scratch = [like.new_empty(0 if peer == rank else numel) for peer in range(self._collectives.size)]
        for start in range(0, self._longest, numel):
            sent = [
                _packed(self._outgoing[peer] if peer != rank else (), buffers, start, space)
                for peer, space in enumerate(scratch)
            ]
            parts = [
                whole.narrow(0, low := min(start, whole.numel()), min(numel, whole.numel() - low)) for whole in received
            ]
            self._collectives.all_to_all(parts, sent)
        return received


def _packed(copies: Sequence[Copy], buffers: Sequence[Tensor], start: int, space: Tensor) -> Tensor:
    """The elements of the concatenated `copies` from `start` on that fit into `space`.

    They are copied to `space` unless they are already contiguous.
    """
    cursor, parts = 0, []
    for copy in copies:
        low, high = max(start, cursor), min(start + space.numel(), cursor + copy.numel)
        if low < high:
            parts.append(buffers[copy.source_buffer].narrow(0, copy.source_offset + low - cursor, high - low))
        cursor += copy.numel
    if len(parts) == 1:
        return parts[0]
    filled = sum(part.numel() for part in parts)
    return torch.cat(parts, out=space.narrow(0, 0, filled)) if parts else space.narrow(0, 0, 0)


def join(placed: Sequence[Placed], numel: int, dtype: torch.dtype) -> Streamed:
    """A buffer of `numel` elements from its pieces; the rest is zero."""
    parts: list[Tensor] = []
    cursor = 0
    for piece in sorted(placed, key=lambda piece: piece.offset):
        if cursor < piece.offset:
            parts.append(_zeros(piece.offset - cursor, dtype))
        parts.append(piece.values)
        cursor = piece.offset + piece.values.numel()
    if cursor < numel:
        parts.append(_zeros(numel - cursor, dtype))
    return Streamed(dtype, (numel,), tuple(parts))


def _zeros(numel: int, dtype: torch.dtype) -> Tensor:
    """Zeros without memory."""
    return torch.zeros(1, dtype=dtype).expand(numel)


@torch.no_grad()
def files_of(
    subject: Subject,
    run: RunState,
    *,
    writes_shared_file: bool,
    exclude_frozen: bool = False,
    exclude_trained: bool = False,
    snapshot: Snapshot | None = None,
) -> dict[str, Any]:
    """This rank's files, name -> content; tensors are not copied. Collective.

    Args:
        writes_shared_file: whether this rank writes the model file that all ranks share below stage 3.
        exclude_trained: leave out trained weights whose masters are saved, which is enough for hf_zero's loads.
        snapshot: keeps their present values, if given.
    """
    subject.assembly.store.sync_masters()
    if not subject.writes:
        return {}
    share = snapshot.share if snapshot is not None and (snapshot.is_described or hosts().num_hosts == 1) else None
    with subject.assembly.optimizer.updater.stager.viewing():
        collected = _Collected.of(subject, share)
        weights = _weights(subject, exclude_frozen=exclude_frozen, exclude_trained=exclude_trained)
        if subject.stage == 0:
            return _stage_0(subject, run, collected, weights) if writes_shared_file else {}
        if subject.stage == 3:
            return _stage_3(subject, run, collected, weights)
        return _stages_1_2(subject, run, collected, weights, writes_shared_file=writes_shared_file)


@dataclass(frozen=True, slots=True)
class _Collected:
    """States of this rank's shards and of whole tensors, the groups' summaries over all ranks, and access to other
    ranks' states without sending them."""

    states: Sequence[ShardState]
    whole: WholeStates
    groups: Sequence[GroupSummary]
    share: Share | None

    @classmethod
    def of(cls, subject: Subject, share: Share | None) -> _Collected:
        updater = subject.assembly.optimizer.updater
        updater.collect_state()
        states = read_sub_groups(updater)
        groups = summarise(updater, states, len(subject.assembly.members), subject.groups.shard)
        return cls(states, updater.whole_states(), groups, share)

    @property
    def is_bound(self) -> bool:
        """Whether states only fit the shards of this layout, on any rank and so on all."""
        return any(group.is_bound for group in self.groups)

    @property
    def has_forms(self) -> bool:
        """Whether this rank has states in storage formats."""
        return any(isinstance(moment, Stored) for state in self.states for moment in state.moments.values())

    def part(self, subject: Subject) -> OptimizerPart:
        """Data shared by the groups of all files."""
        names = subject.names
        steps = {}
        for group in self.groups:
            common = group.scalars.get(ds.STEP, 0)
            steps.update({names[index]: seen for index, seen in group.steps.items() if seen != common})
        return OptimizerPart(
            options=[
                {
                    key: value
                    for key, value in subject.assembly.optimizer.param_groups[number].items()
                    if key != ds.PARAMS
                }
                for number in subject.filled_groups()
            ],
            overflow=subject.assembly.optimizer.overflow,
            clip_grad=subject.resolved.gradients.clip_norm,
            scaler=subject.scaler,
            steps=steps,
            whole=for_file(self.whole, names) if subject.stage else {},
            bound=bound_for_file(subject.assembly.optimizer.updater, names) if self.is_bound else (),
            others=others_for_file(subject.assembly.optimizer.updater),
            errors=errors_for_file(subject.assembly.reducer, names),
        )

    def kinds(self) -> dict[str, torch.dtype]:
        """All kinds of state of any group, in the same order on all ranks."""
        dtypes: dict[str, torch.dtype] = {}
        for group in self.groups if not self.is_bound else ():
            for kind, dtype in group.kinds.items():
                dtypes[kind] = torch.promote_types(dtypes.get(kind, dtype), dtype)
        return dict(sorted(dtypes.items()))


@dataclass(frozen=True, slots=True)
class _Target:
    """One flat tensor of a file: its optimizer group, and its length as master and as moment."""

    group: int
    master_numel: int
    moment_numel: int


Arrivals = Iterator[Sequence[tuple[Awaited, Streamed]]]


def _group_states(
    subject: Subject, collected: _Collected, targets: Sequence[_Target], wanted: Sequence[Extent]
) -> tuple[list[GroupState], Arrivals | None]:
    """Build this rank's targets from the shards of all ranks.

    Args:
        wanted: the extents in the targets of all ranks; buffers are numbered like `targets`.

    Returns:
        If elements must be sent between ranks or converted, the groups hold `Awaited` tensors, which the second value
        produces, one kind of state at a time: all kinds at once would take as much memory as the shards themselves.
    """
    shard = subject.groups.shard
    source = [extent for rank in range(shard.size) for extent in subject.extents(rank)]
    exchange = Exchange(reshard(source, wanted), shard, collected.share)
    states = _target_states(subject, collected, targets)
    comes_later = not exchange.is_local or collected.has_forms
    by_kind: list[list[Awaited | Streamed]] = []
    for of_kind in states:
        local = None if comes_later else of_kind.fill(exchange)
        by_kind.append(
            [Awaited(of_kind.dtype, (numel,)) for numel in of_kind.lengths] if local is None else list(local)
        )
    groups = []
    for number, target in enumerate(targets):
        known = collected.groups[target.group]
        moments = {
            of_kind.kind: by_kind[i][number] for i, of_kind in enumerate(states) if i and of_kind.kind in known.kinds
        }
        groups.append(GroupState(by_kind[0][number], moments, _scalars(subject, known.scalars)))
    if not comes_later:
        return groups, None
    return groups, (
        _batch(of_kind, exchange, awaited, groups) for of_kind, awaited in zip(states, by_kind, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _TargetStates:
    """One kind of state of all targets: its present buffers, and the number of elements of each target."""

    kind: str
    dtype: torch.dtype
    lengths: Sequence[int]
    buffers: Callable[[], list[Tensor]]

    def fill(self, exchange: Exchange) -> list[Streamed]:
        """Fill the targets. Collective."""
        placed = exchange.fill(self.buffers())
        return [join(placed.get(number, ()), numel, self.dtype) for number, numel in enumerate(self.lengths)]


def _target_states(subject: Subject, collected: _Collected, targets: Sequence[_Target]) -> list[_TargetStates]:
    """The masters, then every kind of moment; the same on all ranks."""
    own = subject.assembly.optimizer.sub_groups
    fp32 = torch.float32
    for sub_group in own:
        fp32 = torch.promote_types(fp32, sub_group.master.dtype)
    held = [sub_group.master.detach() for sub_group in own]  # in memory now, but maybe on a drive later
    masters = _TargetStates("", fp32, [t.master_numel for t in targets], lambda: [master.to(fp32) for master in held])
    lengths = [target.moment_numel for target in targets]
    return [
        masters,
        *(
            _TargetStates(kind, dtype, lengths, partial(buffers_of, kind, dtype, own, collected.states))
            for kind, dtype in collected.kinds().items()
        ),
    ]


def _batch(
    of_kind: _TargetStates, exchange: Exchange, awaited: Sequence[Awaited | Streamed], groups: Sequence[GroupState]
) -> list[tuple[Awaited, Streamed]]:
    """The results of one exchange that the groups need."""
    used = {id(content) for group in groups for content in (group.master, *group.moments.values())}
    return [
        (place, content)
        for place, content in zip(awaited, of_kind.fill(exchange), strict=True)
        if isinstance(place, Awaited) and id(place) in used
    ]


def _arriving(content: dict[str, Any], arrivals: Arrivals | None) -> Any:
    return content if arrivals is None else Arriving(content, arrivals)


def _scalars(subject: Subject, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Counters in the optimizer's format: torch's own use tensors, DeepSpeed's and hf_zero's use numbers.

    DeepSpeed passes them on unchanged when it converts a checkpoint to its universal format.
    """
    optimizer = subject.assembly.optimizer.updater.optimizer
    if ds.STEP not in scalars or not type(optimizer).__module__.startswith("torch.optim"):
        return dict(scalars)
    return {**scalars, ds.STEP: torch.tensor(float(scalars[ds.STEP]))}


def _members(subject: Subject) -> dict[int, tuple[Member, ...]]:
    """The parameters of each optimizer group in the files, by its number."""
    shapes, groups = subject.file_shapes, subject.filled_groups()
    return {n: tuple(Member(index, math.prod(shapes[index])) for index in group) for n, group in groups.items()}


def _stages_1_2(
    subject: Subject, run: RunState, collected: _Collected, weights: ModelWeights, *, writes_shared_file: bool
) -> dict[str, Any]:
    rank, world, names = subject.groups.shard.rank, subject.groups.shard.size, subject.names
    groups_of = _members(subject)
    orders = [round_robin(m, world) if subject.round_robin else m for m in groups_of.values()]
    layouts = [GroupPartition(members, world) for members in orders]
    targets = [
        _Target(group, layout.partition_numel - layout.padding(rank), layout.partition_numel)
        for group, layout in zip(groups_of, layouts, strict=True)
    ]
    wanted = [e for r in range(world) for group, layout in enumerate(layouts) for e in layout.extents(r, group)]
    groups, arrivals = _group_states(subject, collected, targets, wanted)
    states = optimizer_states_1_2(run, rank, collected.part(subject), names, layouts, groups)
    files = {ds.optimizer_file(rank, bf16=subject.bf16, model_rank=subject.model_rank): _arriving(states, arrivals)}
    if writes_shared_file:
        shapes = subject.file_shapes
        in_order = [{names[m.parameter]: shapes[m.parameter] for m in layout.members} for layout in layouts]
        files[ds.model_file(rank, subject.stage, subject.model_rank)] = model_states(run, weights, in_order)
    return files


def _stage_3(subject: Subject, run: RunState, collected: _Collected, weights: ModelWeights) -> dict[str, Any]:
    rank, world, names = subject.groups.shard.rank, subject.groups.shard.size, subject.names
    shapes = subject.file_shapes
    subs: list[SubGroupPartition] = []
    targets: list[_Target] = []
    numbers: list[list[int]] = []
    for group, members in _members(subject).items():
        mine = sub_groups(members, world, max(1, subject.resolved.zero.sub_group_numel))
        numbers.append(list(range(len(subs), len(subs) + len(mine))))
        subs += mine
        targets += [_Target(group, sub.numel, sub.numel) for sub in mine]
    wanted = [e for r in range(world) for number, sub in enumerate(subs) for e in sub.extents(r, number)]
    groups, arrivals = _group_states(subject, collected, targets, wanted)
    states = optimizer_states_3(run, collected.part(subject), numbers, groups)
    in_order = [{names[m.parameter]: shapes[m.parameter] for m in sub.members} for sub in subs]
    name = ds.optimizer_file(rank, bf16=subject.bf16, model_rank=subject.model_rank)
    model = model_states(run, weights, in_order)
    return {name: _arriving(states, arrivals), ds.model_file(rank, 3, subject.model_rank): model}


def _stage_0(subject: Subject, run: RunState, collected: _Collected, weights: ModelWeights) -> dict[str, Any]:
    """Every rank holds everything and one rank writes it, without sending."""
    own, names, shapes = subject.assembly.optimizer.sub_groups, subject.names, subject.shapes
    states: dict[str, GroupState] = {}
    for parameter, parts in parts_by_parameter(own, collected.states).items():
        shape, first = shapes[parameter], parts[0]
        master = _joined([part.master for part in parts], shape)
        if collected.whole:
            states[names[parameter]] = _whole_state(subject, master, collected.whole.get(parameter, {}))
            continue
        moments = {kind: _joined([part.moments[kind] for part in parts], shape) for kind in first.moments}
        scalars, steps = {**first.scalars}, collected.groups[first.group].steps
        if parameter in steps:
            scalars[ds.STEP] = steps[parameter]
        states[names[parameter]] = GroupState(master, moments, _scalars(subject, scalars))
    has_masters = any(sub_group.lp_param is not None for sub_group in own)
    part, in_order = collected.part(subject), subject.group_shapes()
    optimizer = optimizer_states_0(part, in_order, states, has_masters=has_masters)
    extras = ours(part)
    if outside := {name: states[name].master for name in names if name not in weights.module}:
        extras[ds.OUTSIDE_WEIGHTS] = outside  # DeepSpeed's `module` only has the model's
    return {ds.model_file(0, 0, subject.model_rank): model_states(run, weights, in_order, optimizer, extras)}


def _joined(parts: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
    return (parts[0] if len(parts) == 1 else torch.cat(list(parts))).view(shape)


def _whole_state(subject: Subject, master: Tensor, state: Mapping[str, Any]) -> GroupState:
    tensors = {kind: v.detach() for kind, v in state.items() if isinstance(v, Tensor) and kind not in COUNTERS}
    numbers = {kind: v.item() if isinstance(v, Tensor) else v for kind, v in state.items() if kind not in tensors}
    return GroupState(master, tensors, _scalars(subject, numbers))


def model_files_of(
    subject: ModelSubject, run: RunState, *, writes_shared_file: bool, exclude_frozen: bool
) -> dict[str, Any]:
    """This rank's files of a model without optimizer: like stage 0, or at stage 3 its shard."""
    if subject.store is not None:
        subject.store.sync_masters()
    weights = _weights(subject, exclude_frozen=exclude_frozen)
    if subject.stage < 3:
        weights = replace(weights, frozen=None, frozen_shapes=None)  # already in `module`
    elif weights.frozen is None:
        weights = replace(weights, frozen={}, frozen_shapes={})
    if not subject.writes or (subject.stage < 3 and not writes_shared_file):
        return {}
    name = ds.model_file(subject.groups.shard.rank, subject.stage, subject.model_rank)
    return {name: model_states(run, weights, [], ours={ds.MANIFEST_KEY: True})}


def _weights(subject: ModelSubject, *, exclude_frozen: bool, exclude_trained: bool = False) -> ModelWeights:
    aliases, left_out = subject.aliases(), subject.excludable() if exclude_frozen else set()
    frozen = {name: parameter for name, parameter in subject.frozen().items() if name not in left_out}
    dropped = left_out | {alias for alias, owner in aliases.items() if owner in left_out}
    buffers = dict(persistent_buffers(subject.module))
    sharded = subject.stage == 3
    values = {name: _file_value(subject, parameter) for name, parameter in frozen.items()}
    parameters: dict[str, Tensor] = {}
    frozen_ids = {id(parameter) for parameter in subject.frozen().values()}
    for name, parameter in subject.module.named_parameters(remove_duplicate=False):
        # No rank has whole experts; they are in the optimizer files.
        is_apart = sharded or subject.groups.of(parameter) is not subject.groups
        is_apart |= exclude_trained and subject.stage > 0 and id(parameter) not in frozen_ids
        parameters[name] = torch.empty(0, dtype=parameter.dtype) if is_apart else parameter.detach()
        if is_apart and not sharded and name in values:
            parameters[name] = values[name]
    known = {**parameters, **buffers, **_extra_states(subject)}
    module = {name: known[name] for name in state_dict_order(subject.module) if name in known and name not in dropped}
    rank, world = subject.groups.shard.rank, subject.groups.shard.size
    return ModelWeights(
        module=module,
        buffer_names=[name for name in module if name in buffers],
        shared={} if sharded and rank else aliases,
        frozen_shapes={name: shape_in_files(parameter) for name, parameter in frozen.items()},
        frozen=None
        if exclude_frozen and not frozen
        else {name: _fragment(values[name], rank, world) if sharded else values[name] for name in frozen},
        affine_maps=affine_maps(
            cuts_of(subject.module),
            {name: shape_in_files(parameter) for name, parameter in subject.module.named_parameters()},
        ),
    )


def _extra_states(subject: ModelSubject) -> dict[str, Any]:
    """Extra states that can be read back; others do not make the save fail."""
    states: dict[str, Any] = {}
    for name, inner in with_extra_states(subject.module):
        state = plain(inner.get_extra_state())
        if (why := why_unreadable(state)) is None:
            states[name] = state
        elif subject.groups.world.rank == 0:
            logger.warning("%s is not saved: %s", name, why)
    return states


def _file_value(subject: ModelSubject, parameter: torch.nn.Parameter) -> Tensor:
    """A frozen parameter in the form of the files. Collective for experts."""
    part = held_part(parameter)
    if part is None or not part.is_mixed:
        return parameter if of(parameter) is not None else parameter.detach()
    return part.joined(parameter.detach()).cpu()


def _fragment(parameter: Tensor, rank: int, world: int) -> Tensor:
    handle = of(parameter)
    return handle.view() if handle is not None else local_chunk(parameter.detach(), rank, world)
