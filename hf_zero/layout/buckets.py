"""Lays out parameters in flat buckets and splits every bucket into one equal shard per rank.

    parameters in registration order        a  b  c  d  e  f
    in reverse, as gradients arrive         |e f| |c d| |a b|      three buckets, launched left to right
    one bucket, world size two              [e e e . f f f f f . . .]
                                            [ shard 0  |  shard 1   ]     "." is padding, always zero

Such a bucket only holds parameters of one optimizer group, one dtype and one group of ranks, so a shard has one set of
hyperparameters and one element size. Inside a bucket every parameter starts at a multiple of `ALIGN_NUMEL` elements:
64 bytes for 16-bit types, so that matrix kernels use their aligned paths although the weights are views.

Stage 3 lays out the parameters of a unit in equal shards, splitting each parameter separately.

    three parameters, world size two   a: 5 elements    b: 4    f: 3 (frozen)
    gathered unit, one row per rank    [ a0 a1 a2 | b0 b1 | f0 f1 ]      shard of rank 0
                                       [ a3 a4  . | b2 b3 | f2  . ]      shard of rank 1      "." is padding, always 0
                                         `---- trained ----\'

Every parameter is split into ceil(numel / world) elements per rank, as in DeepSpeed, so that a rank's checkpoint holds
exactly the rank's shards. One collective gathers the whole unit; gradients only use the trained part of the rows, which
comes first and is ordered by optimizer group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ALIGN_NUMEL = 32
MAX_BUCKET_NUMEL = 1 << 25  # 64 MiB of 16-bit gradients: networks reach full speed with much less
MANY_RANKS = 256  # a part of the largest bucket is 256 KiB there
MIN_BUCKET_NUMEL = 1 << 20  # smaller collectives cost more in latency than they gain in overlap
BUCKETS_PER_MODEL = 8  # enough to overlap reduction with backward, and a pool of two is a quarter of the gradients
# Vectorised kernels treat the last few elements of a vector differently. Cuts at multiples of this avoid new ends.
CUT_NUMEL = 64


@dataclass(frozen=True, slots=True)
class Interval:
    """Elements `start <= i < stop` of a flat vector."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"an interval needs 0 <= start <= stop, got [{self.start}, {self.stop})")

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def intersect(self, other: Interval) -> Interval | None:
        """The intersection, or None if it is empty."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Interval(start, stop) if start < stop else None


def round_up(numel: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is at least `numel`."""
    return -(-numel // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Sizes of one trainable parameter for the layout.

    Attributes:
        world: number of ranks that shard it, if this differs from the other parameters; 0: the same.
    """

    name: str
    numel: int
    group: int
    dtype: str
    world: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter in its bucket, or in every row of it. `parameter` indexes the layout's specs."""

    parameter: int
    offset: int
    numel: int

    @property
    def interval(self) -> Interval:
        return Interval(self.offset, self.offset + self.numel)


@dataclass(frozen=True, slots=True)
class Run:
    """Elements of a shard from `start` up to the next run, which belong to optimizer group `group`."""

    group: int
    start: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A rank's part of one parameter: `numel` elements from `in_parameter`, at `in_shard` of the shard."""

    parameter: int
    in_shard: int
    in_parameter: int
    numel: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat buffer of `numel` elements (including padding) that is reduced and gathered in one collective.

    Its parameters are contiguous (`by_rows` false) or, at stage 3, each is split into `world` equal chunks, one in
    every row; a row is a rank's shard (see `hf_zero.layout.buckets`).
    """

    index: int
    dtype: str
    world: int
    numel: int
    slots: tuple[Slot, ...]
    runs: tuple[Run, ...]
    by_rows: bool = False

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world

    def chunk(self, slot: Slot) -> int:
        """Elements of the parameter per row, including the last row's padding."""
        return chunk_numel(slot.numel, self.world if self.by_rows else 1)

    def shard(self, rank: int) -> Interval:
        """The interval of the bucket that `rank` owns."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a world of {self.world}")
        return Interval(rank * self.shard_numel, (rank + 1) * self.shard_numel)

    def pieces(self, owned: Interval) -> tuple[Piece, ...]:
        """The parts of parameters in `owned`, in order. In a bucket of rows `owned` is one row."""
        if self.by_rows:
            return self._pieces_of_row(owned.start // self.shard_numel)
        parts = []
        for slot in self.slots:
            common = slot.interval.intersect(owned)
            if common is not None:
                parts.append(
                    Piece(slot.parameter, common.start - owned.start, common.start - slot.offset, common.numel)
                )
        return tuple(parts)

    def _pieces_of_row(self, row: int) -> tuple[Piece, ...]:
        chunks = []
        for slot in self.slots:
            chunk = self.chunk(slot)
            numel = min(chunk, slot.numel - row * chunk)
            if numel > 0:
                chunks.append(Piece(slot.parameter, slot.offset, row * chunk, numel))
        return tuple(chunks)

    def gaps(self) -> tuple[Interval, ...]:
        """The padding between parameters: intervals of the buffer, or of every row, that belong to no parameter."""
        between, cursor = [], 0
        for slot in self.slots:
            if cursor < slot.offset:
                between.append(Interval(cursor, slot.offset))
            cursor = slot.offset + self.chunk(slot)
        end = self.shard_numel if self.by_rows else self.numel
        if cursor < end:
            between.append(Interval(cursor, end))
        return tuple(between)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Assigns every trainable parameter to exactly one bucket; `buckets` are in launch order."""

    specs: tuple[ParameterSpec, ...]
    buckets: tuple[Bucket, ...]
    world: int

    def bucket_of(self) -> tuple[int, ...]:
        """Bucket index of each parameter."""
        owner = [-1] * len(self.specs)
        for bucket in self.buckets:
            for slot in bucket.slots:
                owner[slot.parameter] = bucket.index
        return tuple(owner)


def chunk_numel(numel: int, world: int) -> int:
    """Elements per rank of a parameter that is sharded separately; the last rank's may include padding."""
    return -(-numel // world)


def chunk_interval(numel: int, rank: int, world: int) -> Interval:
    """The elements of such a parameter that belong to `rank`, without padding."""
    chunk = chunk_numel(numel, world)
    return Interval(min(rank * chunk, numel), min((rank + 1) * chunk, numel))


def effective_bucket_numel(total_numel: int, limit: int, world: int = 1, *, is_given: bool = False) -> int:
    """The number of elements per bucket, if the config allows `limit` of `total_numel`.

    The limit is a maximum: DeepSpeed's default of 5e8 would put most models into a single bucket, which can only be
    reduced after backward has ended. A limit that the user has given (`is_given`) is respected from `MANY_RANKS` on,
    where each rank's part of a bucket gets too small for the network.
    """
    if is_given and world >= MANY_RANKS:
        return max(1, limit)
    preferred = max(MIN_BUCKET_NUMEL, -(-total_numel // BUCKETS_PER_MODEL))
    return max(1, min(limit, preferred, MAX_BUCKET_NUMEL))


def plan_layout(specs: Sequence[ParameterSpec], *, world: int, bucket_numel: int) -> FlatLayout:
    """Split `specs` (registration order) into buckets of at most `bucket_numel` elements, or one larger parameter.

    Raises:
        ValueError: for a world size or bucket size below one, or an empty parameter.
    """
    if world < 1 or bucket_numel < 1:
        raise ValueError(f"a layout needs world >= 1 and bucket_numel >= 1, got {world} and {bucket_numel}")
    for spec in specs:
        if spec.numel < 1:
            raise ValueError(f"parameter {spec.name!r} has {spec.numel} elements; the layout takes only non-empty ones")
    members = _group_backwards(specs, bucket_numel)
    # A bucket is complete when its first registered parameter's gradient arrives, because these arrive in reverse.
    members.sort(key=min, reverse=True)
    buckets = [_lay_out(index, sorted(chosen), specs, world) for index, chosen in enumerate(members)]
    return FlatLayout(specs=tuple(specs), buckets=tuple(buckets), world=world)


def _group_backwards(specs: Sequence[ParameterSpec], bucket_numel: int) -> list[list[int]]:
    closed: list[list[int]] = []
    open_buckets: dict[tuple[int, str, int], tuple[list[int], int]] = {}
    for index in reversed(range(len(specs))):
        spec = specs[index]
        key = (spec.group, spec.dtype, spec.world)
        chosen, filled = open_buckets.get(key, ([], 0))
        if chosen and filled + spec.numel > bucket_numel:
            closed.append(chosen)
            chosen, filled = [], 0
        chosen.append(index)
        open_buckets[key] = (chosen, filled + spec.numel)
    closed.extend(chosen for chosen, _ in open_buckets.values())
    return closed


def _lay_out(index: int, chosen: list[int], specs: Sequence[ParameterSpec], world: int) -> Bucket:
    slots, cursor = [], 0
    for parameter in chosen:
        slots.append(Slot(parameter, cursor, specs[parameter].numel))
        cursor += round_up(specs[parameter].numel, ALIGN_NUMEL)
    first = specs[chosen[0]]
    world = first.world or world
    return Bucket(
        index=index,
        dtype=first.dtype,
        world=world,
        numel=round_up(cursor, world * ALIGN_NUMEL),
        slots=tuple(slots),
        runs=(Run(first.group, 0),),
    )


def cut_sub_groups(bucket: Bucket, owned: Interval, limit: int | None) -> tuple[tuple[int, Interval], ...]:
    """(optimizer group, elements of `owned`) of every sub-group, in order; together they cover `owned`.

    Args:
        limit: maximum number of elements, rounded up to a multiple of `CUT_NUMEL`; None: one sub-group per run.
    """
    parts = []
    for number, run in enumerate(bucket.runs):
        stop = bucket.runs[number + 1].start if number + 1 < len(bucket.runs) else owned.numel
        step = stop - run.start if limit is None else round_up(max(1, limit), CUT_NUMEL)
        for start in range(run.start, stop, max(1, step)):
            parts.append((run.group, Interval(start, min(start + step, stop))))
    return tuple(parts)


def pieces_of_sub_group(bucket: Bucket, owned: Interval, part: Interval) -> tuple[Piece, ...]:
    """The parts of parameters in elements `part` of `owned`; `in_shard` is relative to the start of `part`."""
    inside = []
    for piece in bucket.pieces(owned):
        common = Interval(piece.in_shard, piece.in_shard + piece.numel).intersect(part)
        if common is not None:
            skipped = common.start - piece.in_shard
            inside.append(Piece(piece.parameter, common.start - part.start, piece.in_parameter + skipped, common.numel))
    return tuple(inside)


CHUNK_ALIGN_NUMEL = 8  # 16 bytes of a 16-bit type: allows wide copies with little padding at any world size
DIRECT_ALIGN_BYTES = 16  # NCCL moves other pieces element by element
# Below this mean size of a rank's chunk, several small collectives take longer than one and a copy. An estimate, not a
# measurement: each further collective costs a ring one hop's latency per rank (2 us; NCCL runs some 16 of a group side
# by side), and saves a copy of a chunk per rank (read and written at 2 to 3 TB/s).
MIN_DIRECT_BYTES = 1 << 17


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """One parameter of a unit: `group` is its optimizer group, None if it is not trained."""

    index: int
    numel: int
    group: int | None


@dataclass(frozen=True, slots=True)
class ShardSlot:
    """The place of one parameter: `chunk` elements at `offset` of every row; at `full_offset` when gathered."""

    member: int
    numel: int
    chunk: int
    offset: int
    full_offset: int


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The rows of a unit that a rank keeps: its own and, with hpZ, those of ranks at its place in the other groups.

        world size 6, groups of 2   rows 0 1 | 2 3 | 4 5     rank 3 keeps rows 1, 3 and 5; its own is number 1 of these

    Attributes:
        group: number of ranks per group, which keep all rows between them.
        place: this rank's number in its group.
        own: index of its own row among the kept rows.
        count: number of kept rows, which is the number of groups.
    """

    group: int
    place: int
    own: int = 0
    count: int = 1

    def row(self, kept: int) -> int:
        """The index of a kept row among all rows of the unit."""
        return kept * self.group + self.place


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Parameters of one dtype that are gathered together.

    Attributes:
        row_numel: elements of one rank's shard.
        trained_numel: number of leading elements that belong to trained parameters.
        full_numel: elements of the storage for whole parameters.
        runs: optimizer groups inside the trained part.
    """

    world: int
    dtype: str
    slots: tuple[ShardSlot, ...]
    row_numel: int
    trained_numel: int
    full_numel: int
    runs: tuple[Run, ...]

    def bucket(self, index: int, parameters: dict[int, int]) -> Bucket:
        """The gradients' bucket: the trained part of all rows. `parameters` maps members to the layout's specs."""
        return Bucket(
            index=index,
            dtype=self.dtype,
            world=self.world,
            numel=self.trained_numel * self.world,
            slots=tuple(
                Slot(parameters[slot.member], slot.offset, slot.numel)
                for slot in self.slots
                if slot.offset < self.trained_numel
            ),
            runs=self.runs,
            by_rows=True,
        )


def direct_chunks(numels: Iterable[int], world: int, itemsize: int) -> tuple[int, ...]:
    """Elements of each chunk of a row, if one group of collectives moves the chunks from or to the whole parameters.
    Empty if the row is moved as a whole, and copied. The same on all ranks.

    Every chunk must be a contiguous piece of its parameter on every rank. Then rows have no gaps either.

    Args:
        numels: elements of each parameter in the row.
        itemsize: bytes per element in the collectives.
    """
    sizes = [numel for numel in numels if numel]
    chunks = tuple(chunk_numel(numel, world) for numel in sizes)
    are_even = all(
        numel == chunk * world and not chunk % CHUNK_ALIGN_NUMEL and not chunk * itemsize % DIRECT_ALIGN_BYTES
        for numel, chunk in zip(sizes, chunks, strict=True)
    )
    return chunks if are_even and sum(chunks) * itemsize >= len(chunks) * MIN_DIRECT_BYTES else ()


def lay_rows(members: Sequence[MemberSpec], *, world: int, dtype: str, full_align: int) -> RowLayout:
    """Shard `members`: trained ones first, by group, each split into `world` chunks.

    Args:
        full_align: whole parameters start at multiples of this many elements.
    """
    trained = sorted((member for member in members if member.group is not None), key=lambda m: (m.group, m.index))
    frozen = [member for member in members if member.group is None]
    slots: list[ShardSlot] = []
    runs: list[Run] = []
    offset = full_offset = trained_numel = 0
    for member in [*trained, *frozen]:
        if member.group is not None and (not runs or runs[-1].group != member.group):
            runs.append(Run(member.group, offset))
        chunk = chunk_numel(member.numel, world)
        slots.append(ShardSlot(member.index, member.numel, chunk, offset, full_offset))
        offset += round_up(chunk, CHUNK_ALIGN_NUMEL)
        full_offset += round_up(member.numel, full_align)
        trained_numel = offset if member.group is not None else trained_numel
    return RowLayout(
        world=world,
        dtype=dtype,
        slots=tuple(slots),
        row_numel=offset,
        trained_numel=trained_numel,
        full_numel=full_offset,
        runs=tuple(runs),
    )


def stay_gathered(numels: Sequence[int], always: Sequence[bool], *, largest: int, budget: int) -> list[bool]:
    """Which parameters stay gathered: those that must (`always`), and small ones within the budget.

    Args:
        numels: elements of each parameter, in registration order.
        largest: maximum elements of a small parameter (stage3_param_persistence_threshold).
        budget: maximum elements of all persistent parameters (stage3_model_persistence_threshold).
    """
    decisions = []
    for numel, must in zip(numels, always, strict=True):
        stays = must or (numel <= largest and numel <= budget)
        budget -= numel if stays else 0
        decisions.append(stays)
    return decisions
