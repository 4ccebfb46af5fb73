"""One training step as tasks on lanes: how long it takes with the engine's schedule, given bytes, links and FLOPs.

    compute       forward 1 | forward 2 | ...  backward 2 | backward 1 | update
    collectives   gather 2  | gather 3  | ...  reduce n  | ...
    in            weights 2 | weights 3 | ...                          | updated weights
    out                                        gradients n | ...
    host                                                     update n | update n-1 | ...
    disk      weights 3 | weights 4 | ...                     states n | states n-1 | ...
    exchange           activations 1 | activations 2 | ...
    messages                         end of forward |                end of backward | update
    update                                                                           update 1 | update 2 | ...

Each lane runs its tasks in the order of submission; a task starts when its lane is free and its inputs are
ready. The rules are those of docs/architecture.md: at stage 3 the engine's gather plan decides which units are
prefetched and which stay gathered, copies from host memory are one unit ahead of that, gradients are copied after
their unit, and a sub-group's weights are copied back while the next one is updated. What the device updates while its
weights are stored on the host is updated beside the next forward. Hosts synchronize at the end of a
pass and before weights change. With tensor, sequence or expert parallelism, ranks exchange activations in every unit
and wait for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from hf_zero.config import Zero, resolve
from hf_zero.layout.memory import STREAMED_NUMEL
from hf_zero.params.gather_plan import MOST_BESIDE_UPDATE, Use, plan_gathers

LANES = {
    "compute": "computing",
    "collectives": "gathers and reductions",
    "in": "copies to the device",
    "out": "copies to the host",
    "host": "updates on the host",
    "disk": "the drive",
    "exchange": "activations between ranks",
    "messages": "messages between ranks",
    "update": "updates beside forward",
}
"""Lane -> its work, for tables."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU and its share of the host; achieved bytes and FLOPs per second, not those of a data sheet.

    Attributes:
        gpus: total number, on `hosts` hosts.
        message: seconds that each rank but one adds to a small all-to-all message, which goes around a ring.
        host_waits: the host waits for messages before it computes; otherwise it runs ahead of its device.
        queue: seconds in which the host queues a unit's kernels, between two updates that run beside forward. Measured
            with 28 blocks beside an H100, whose forward took 0.60 s and the updates in it 0.53 s
            (bench/results/2026-11-27-programme-h100-block2.md).
    """

    name: str
    gpus: int
    flops: float
    memory: float
    link: float  # to other GPUs, one direction
    host_link: float  # PCIe, one direction
    host_memory: float  # bandwidth of host memory, this GPU's share
    capacity: float  # bytes of device memory
    hosts: int = 1
    network: float = 25e9  # to other hosts, one direction, this GPU's share
    disk: float = 2e9  # bandwidth of the host's drive, this GPU's share
    message: float = 0.0
    host_waits: bool = False
    queue: float = 2.5e-3

    @property
    def has_one_link(self) -> bool:
        """Whether messages between GPUs go over PCIe, too, like copies to the device."""
        return self.gpus > self.hosts and self.link < self.host_link <= _PCIE


@dataclass(frozen=True, slots=True)
class Shape:
    """A model of equal blocks.

    Attributes:
        flops: of one token's forward; None: two per parameter.
        apart: additional parameters, this rank's experts, which are sharded over the ranks with the same experts.
        touched: bytes of device memory that operators other than matrix products read and write per token in forward.
    """

    name: str
    parameters: float
    units: int
    flops: float | None = None
    apart: float = 0.0
    touched: float = 0.0


@cache
def default_gathers() -> Zero:
    """Stage 3's keys with their default values."""
    return resolve({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}, world_size=1).zero.keys


@dataclass(frozen=True, slots=True)
class Setup:
    """Where states are kept, and how the step runs. Weights and gradients are bf16, masters and both moments fp32.

    Attributes:
        gathers: the keys that limit stage 3's gathers.
        agreement: how ranks agree on stage 3's next gather: by a plan that all follow, through shared memory (free), or
            by a message for each unit. Ignored with a single rank.
    """

    stage: int
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_ratio: float = 1.0  # fraction of the states that is offloaded
    tokens: int = 16384  # per GPU and step
    recomputes: bool = True  # gradient checkpointing
    clips: bool = True  # updates wait for all gradients: for their norm, or to check that they are finite
    streams: bool = False  # hf_zero.streaming
    overlaps_step: bool = True  # hf_zero.overlap_step
    update: Literal["cpu", "device", "both"] = "cpu"  # hf_zero.offload_update: what updates offloaded states
    trained: float = 1.0  # fraction of the parameters that is trained
    micro_batches: int = 1  # per step; they share its tokens
    disk_optimizer: bool = False  # offloaded states are on a drive
    disk_parameters: bool = False
    shard: int | None = None  # ranks of one host that share the states; None: all
    second_shard: int = 1  # stage 3: size of the groups within a host that gather (hpZ); 1: all that share the states
    tensor: int = 1  # consecutive ranks that share each matrix
    experts: int = 1  # consecutive ranks that experts are distributed over
    exchange: tuple[float, float] = (0.0, 0.0)  # seconds of exchanging activations, per forward and per backward
    gathers: Zero = field(default_factory=default_gathers)
    agreement: Literal["plan", "memory", "messages"] = "plan"

    def defers(self, ranks: int) -> bool:
        """Whether updates on the host run beside the next forward, with the states shared by `ranks`."""
        gathers = self.offload_parameters or ranks > 1
        return self.overlaps_step and self.stage == 3 and self.offload_optimizer and not self.streams and gathers

    def streamed(self, machine: Machine, units: Sequence[int]) -> set[int]:
        """Those of offloaded units whose states stream through the device. Shares are chosen as the engine measures
        them (`hf_zero/offload/update_speed.py`), and units as it assigns them, from the last one."""
        if self.update == "cpu" or not self.offload_optimizer or self.streams:
            return set()
        by_cpu, by_device = machine.host_memory / UPDATE_BYTES, machine.host_link / _MEASURED_BYTES
        share = by_device / (by_cpu + by_device) if self.update == "both" else 1.0
        streamed: set[int] = set()
        for number, unit in enumerate(reversed(units)):
            on_cpu = number - len(streamed)
            if share * (number + 1) - len(streamed) > (1 - share) * (number + 1) - on_cpu:
                streamed.add(unit)
        return streamed

    @property
    def updates_beside(self) -> bool:
        """Whether the device updates, on a lane of its own, weights that are stored on the host."""
        in_memory = self.offload_parameters and not self.disk_parameters
        return self.overlaps_step and self.stage == 3 and in_memory and not self.streams and self.second_shard == 1


@dataclass(frozen=True, slots=True)
class PlannedOperation:
    lane: str
    what: str
    start: float
    end: float


@dataclass(slots=True)
class Step:
    """Tasks in the order in which they are submitted.

    Attributes:
        has_one_link: copies to the device and collectives follow one another.
    """

    has_one_link: bool = False
    pieces: list[PlannedOperation] = field(default_factory=list)
    _free: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LANES, 0.0))

    def do(self, lane: str, what: str, seconds: float, *after: float) -> float:
        """Submit a task; returns its end time."""
        resource = "collectives" if lane == "in" and self.has_one_link else lane
        if not seconds:  # there is nothing to do, and so nothing that others wait behind
            return max(*after, 0.0) if after else 0.0
        start = max(self._free[resource], *after, 0.0)
        self._free[resource] = start + seconds
        self.pieces.append(PlannedOperation(lane, what, start, start + seconds))
        return start + seconds

    def end_of(self, lane: str) -> float:
        """When the lane has run its tasks so far."""
        return self._free[lane]

    @property
    def seconds(self) -> float:
        return max(piece.end for piece in self.pieces)

    @property
    def busy(self) -> dict[str, float]:
        """Seconds of work per lane: each is a lower bound of the step."""
        seconds = dict.fromkeys(LANES, 0.0)
        for piece in self.pieces:
            seconds[piece.lane] += piece.end - piece.start
        return seconds

    @property
    def bound(self) -> str:
        return max(LANES, key=lambda lane: self.busy[lane])


_PCIE = 64e9  # of 16 lanes of its fifth generation, one direction
UPDATE_BYTES = 28  # per parameter: masters and moments read and written, gradient read, weight written
# A split master (16 bits in addition to the weight's) moves 26 bytes, but needs more arithmetic: 1.6 to 2.1 times the
# time on one core and two (bench/cpu_adam.py), less if many cores wait for memory.
STREAMED_BYTES = 50
_MEASURED_BYTES = 16  # per parameter that streams through the device, with an fp32 gradient: in one direction


@dataclass(frozen=True, slots=True)
class _Seconds:
    forward: float
    backward: float
    gather: float
    reduce: float
    bring: float
    take: float
    leave: float  # updated weights to the host
    host_update: float
    update: float
    gather_updated: float
    read: float
    states: float  # one read from the drive, or one write
    stream: float  # states of a unit through the device: masters, moments and gradients in; weights instead, out
    streamed_update: float
    chunks: float  # in which they stream
    exchange: tuple[float, float]  # forward, backward
    message: float  # among the ranks that gather together


STATE_BYTES = 12  # per parameter: master and both moments


def _exchange(machine: Machine, num_bytes: float, ranks: int, stride: int) -> float:
    """Seconds of an all-gather or reduce-scatter of a tensor among `ranks` ranks, every `stride`-th: a ring is as fast
    as its slowest link."""
    per_host = max(1, machine.gpus // machine.hosts)
    link = machine.link if ranks * stride <= per_host else min(machine.link, machine.network)
    return num_bytes * (ranks - 1) / ranks / link


def exchange_seconds(machine: Machine, operation: str, within: float, across: float) -> float:
    """Seconds of receiving bytes from ranks of the same host and of others; all-to-all uses both links at once."""
    network = min(machine.link, machine.network)
    if operation == "all_to_all":
        return max(within / machine.link, across / network)
    return (within + across) / (network if across else machine.link)


def _seconds(machine: Machine, shape: Shape, setup: Setup) -> _Seconds:
    numel = shape.parameters / shape.units
    lane = machine.gpus // setup.tensor
    ranks = min(setup.shard or lane, lane)
    owned = numel / ranks if setup.stage else numel
    kept, kept_ranks = shape.apart / shape.units, max(1, ranks // setup.experts)
    kept_once = _exchange(machine, 2 * kept, kept_ranks, setup.experts)
    updated = (owned + kept / kept_ranks) * setup.trained
    once = _exchange(machine, 2 * numel, ranks, setup.tensor)
    reduce = once * (2 if setup.stage == 0 else 1)
    if ranks < lane:  # the sums of each shard are all-reduced over its copies
        copies = lane / ranks
        reduce += 2 * 2 * (owned + kept / kept_ranks) * (copies - 1) / copies / min(machine.link, machine.network)
    around_use, updated_rows, gathering = once, 0.0, ranks
    if setup.stage == 3 and 1 < setup.second_shard < ranks:  # second shards are filled after an update
        gathering, groups = setup.second_shard, ranks / setup.second_shard
        around_use = _exchange(machine, 2 * numel, setup.second_shard, setup.tensor)
        updated_rows = 2 * numel / setup.second_shard * (groups - 1) / groups / min(machine.link, machine.network)
    reduce += kept_once
    updated_rows += kept_once if setup.stage == 3 else 0.0  # experts stay gathered
    tokens = setup.tokens / setup.micro_batches
    forward = (2 * numel if shape.flops is None else shape.flops / shape.units) * tokens / machine.flops
    forward += shape.touched / shape.units * tokens / machine.memory
    update_bytes = STREAMED_BYTES if setup.streams else UPDATE_BYTES
    away = setup.offload_ratio if setup.offload_optimizer else 0.0
    return _Seconds(
        forward=forward,
        backward=forward * (1 + setup.trained + setup.recomputes),
        gather=around_use if setup.stage == 3 else 0.0,
        reduce=reduce * setup.trained,
        bring=2 * owned / machine.host_link if setup.offload_parameters else 0.0,
        take=2 * away * updated / machine.host_link,
        leave=2 * updated / machine.host_link,
        host_update=update_bytes * away * updated / machine.host_memory,
        update=UPDATE_BYTES * (1 - away) * updated / machine.memory,
        gather_updated=once + kept_once if setup.stage in (1, 2) else updated_rows * setup.trained,
        read=2 * owned / machine.disk if setup.disk_parameters else 0.0,
        states=STATE_BYTES * updated / machine.disk if setup.disk_optimizer else 0.0,
        stream=(STATE_BYTES + 2) * updated / machine.host_link,
        streamed_update=UPDATE_BYTES * updated / machine.memory,
        chunks=max(1.0, updated / STREAMED_NUMEL),
        exchange=(setup.exchange[0] / shape.units, setup.exchange[1] / shape.units),
        message=machine.message * (gathering - 1),
    )


class _Passes:
    """Forward and backward passes over all units, which are gathered when the engine's prefetcher would gather them.

    Attributes:
        now: end of the last use, and of the message after it if the host waits for messages.
        beside_update: units gathered for the next forward while the others are updated.
    """

    def __init__(self, step: Step, one: _Seconds, machine: Machine, shape: Shape, setup: Setup) -> None:
        self._step, self._one = step, one
        self._numel = max(1, round(shape.parameters / shape.units))
        self._plan = plan_gathers(
            [Use((unit,), self._numel, has_trained=True, reads_in_backward=True) for unit in range(shape.units)],
            max_live_numel=setup.gathers.stage3_max_live_parameters,
            max_reuse_numel=setup.gathers.stage3_max_reuse_distance,
            prefetch_numel=setup.gathers.stage3_prefetch_bucket_size,
        )
        self._is_sharded = setup.stage == 3
        self._agreement = setup.agreement if machine.gpus > setup.tensor else "memory"
        self._host_waits = machine.host_waits
        self._queue = machine.queue
        self._whole: set[int] = set() if self._is_sharded else set(range(shape.units))
        self._fetched: dict[int, float] = {}  # unit -> when its shard is on the device
        self._written: dict[int, float] = {}  # unit -> when the device's update has written its weights to the host
        self._to_update: dict[int, float] = {}  # unit -> seconds of its deferred update
        self._streamed: set[int] = set()  # those that the device updates
        self._gathered: dict[int, float] = {}  # unit -> when its updated weights are there
        self._updated = 0.0  # when the host, which queues all work, has ended its last update
        self._setup = setup
        self._ahead: dict[int, float] = {}  # prefetched unit -> when the gather is agreed on, or has ended
        self.now = 0.0
        if self._is_sharded and self._agreement == "plan" and not setup.offload_parameters:
            while len(self._ahead) < min(MOST_BESIDE_UPDATE, shape.units) and self._has_room():
                self._ahead[len(self._ahead)] = 0.0  # gathered in the step before
        self.beside_update = list(self._ahead)

    def defer(self, units: Sequence[int], seconds: float, streamed: set[int]) -> None:
        """Begin with units whose updates of the step before have been deferred, each with so many seconds of the host,
        except those that are `streamed` through the device."""
        self._to_update, self._streamed = dict.fromkeys(units, seconds), streamed

    def _update(self, unit: int) -> float:
        """Run what is left of the last update up to this unit. Returns when its weights can be read."""
        ready = 0.0
        for each in [each for each in self._to_update if each <= unit]:
            read = self._step.do("disk", f"states {each}", self._one.states)
            seconds = self._to_update.pop(each)
            if each in self._streamed:
                ready = _stream(self._step, self._one, each, read)
            else:
                ready = self._updated = self._step.do("host", f"update {each}", seconds, read)
            self._step.do("disk", f"states {each} back", self._one.states, ready)
            self._step.do("host", f"kernels of {each}", self._queue)
            if not self._setup.offload_parameters and each not in self._streamed:
                ready = self._step.do("in", f"updated weights {each}", self._one.take, ready)
        return ready

    def update_beside(self, units: Iterable[int], update: float, leave: float) -> None:
        """Begin with units that the device updates beside this forward, and whose weights leave for the host."""
        for unit in units:
            updated = self._step.do("update", f"update {unit}", update)
            self._written[unit] = self._step.do("out", f"updated weights {unit}", leave, updated)

    def begin_beside(self, gathered: Mapping[int, float]) -> None:
        """Begin when updated weights are still being gathered: each unit is used when its gather has ended, and after
        all updates on the host, which queues the forward after them."""
        self._gathered = dict(gathered)
        self._updated = self._step.end_of("host")

    def over(self, units: Iterable[int], what: str, seconds: float, exchange: float) -> Iterator[tuple[int, float]]:
        """Run one pass; yields each unit and the end of its use."""
        order = list(units)
        upcoming = deque(unit for unit in order if unit not in self._whole and unit not in self._ahead)
        if upcoming and what == "backward" and self._agreement == "plan":
            self.meet("start of backward")
        for unit in order:
            if unit not in self._whole and unit not in self._ahead:
                self._ask_for(upcoming.popleft())
            here = self._arrival(unit)
            self._whole.add(unit)
            while upcoming and self._has_room():
                self._ask_for(upcoming.popleft())
            if upcoming:
                self._fetch(upcoming[0])
            computed = self._step.do("compute", f"{what} {unit}", seconds, here, self.now, self._updated)
            self.now = self._step.do("exchange", f"activations {unit}", exchange, computed)
            if self._is_sharded and not (what == "forward" and unit in self._plan.kept_for_backward):
                self._whole.remove(unit)
            yield unit, self.now
        self.meet(f"end of {what}")

    def meet(self, what: str, reduced: float = 0.0) -> None:
        """Synchronize all hosts; computation may have to wait for that, and for reductions until `reduced`."""
        if self._is_sharded and self._agreement != "memory":
            told = self._tell(what, reduced)
            self.now = told if self._host_waits else self.now

    def _tell(self, what: str, *after: float) -> float:
        return self._step.do("messages", what, self._one.message, *((self.now, *after) if self._host_waits else ()))

    def _has_room(self) -> bool:
        if self._ahead and self._agreement != "plan":
            return False
        ahead, live = len(self._ahead) * self._numel, len(self._whole) * self._numel
        return self._plan.has_room_for(self._numel, ahead_numel=ahead, live_numel=live)

    def _fetch(self, unit: int, updated: float = 0.0) -> None:
        if unit not in self._fetched and unit not in self._to_update:
            read = self._step.do("disk", f"weights {unit}", self._one.read, self.now, updated)
            written = self._written.pop(unit, 0.0)
            self._fetched[unit] = self._step.do("in", f"weights {unit}", self._one.bring, read, written)

    def _ask_for(self, unit: int) -> None:
        updated = self._update(unit)
        self._fetch(unit, updated)
        self._fetched[unit] = max(self._fetched[unit], updated)
        if self._agreement == "messages":
            self._ahead[unit] = self._tell(f"gather {unit}")
        else:
            self._ahead[unit] = self._gather(unit, self.now)

    def _gather(self, unit: int, *after: float) -> float:
        return self._step.do("collectives", f"gather {unit}", self._one.gather, *after, self._fetched.pop(unit))

    def _arrival(self, unit: int) -> float:
        """Return when a unit is gathered that is used next."""
        if unit in self._whole:
            return self._gathered.pop(unit, 0.0)
        asked = self._ahead.pop(unit)
        # A unit that was only agreed on is gathered when its module waits for it.
        return self._gather(unit, asked, self.now) if self._agreement == "messages" else asked


def simulate(machine: Machine, shape: Shape, setup: Setup) -> Step:
    """Simulate one step in steady state: weights are where the step before has left them. At stages 1 and 2, where the
    next forward waits for one gather after the other, it begins with the update of the step before."""
    step, one, units = Step(machine.has_one_link), _seconds(machine, shape, setup), range(shape.units)
    passes = _Passes(step, one, machine, shape, setup)
    lane = machine.gpus // setup.tensor
    later: list[int] = []  # units whose updates do not run at the end of the step
    update = one
    # The first units stay on the device.
    near = round(shape.units * (1 - setup.offload_ratio)) if setup.offload_optimizer else shape.units
    streamed = setup.streamed(machine, units[near:])
    if setup.defers(min(setup.shard or lane, lane)):
        later = [unit for unit in units[near:] if unit not in passes.beside_update]
        passes.defer(later, one.host_update * shape.units / max(1, shape.units - near), streamed)
        if near:
            update = replace(one, host_update=0.0, update=one.update * shape.units / near)
    elif streamed:  # the others share what does not stream
        far, others = shape.units - near, max(1, shape.units - len(streamed))
        on_host = one.host_update * shape.units * (far - len(streamed)) / far / others
        update = replace(one, host_update=on_host, update=one.update * shape.units / others)
    if setup.updates_beside:
        later += units[:near]
        passes.update_beside(units[:near], update.update, one.leave)
    begins_with_update = setup.stage in (1, 2) and setup.clips  # stages 1 and 2 gather beside the next forward
    if begins_with_update:
        passes.begin_beside(_update(step, update, setup, [(unit, 0.0) for unit in units], [], 0.0, streamed))
    arrived: list[tuple[int, float]] = []
    for number in range(setup.micro_batches):
        reduces = setup.stage >= 2 or number == setup.micro_batches - 1
        list(passes.over(units, "forward", one.forward, one.exchange[0]))
        arrived = []
        for unit, done in passes.over(reversed(units), "backward", one.backward, one.exchange[1]):
            reduced = step.do("collectives", f"reduce {unit}", one.reduce if reduces else 0.0, done)
            arrived.append((unit, step.do("out", f"gradients {unit}", one.take if reduces else 0.0, reduced)))
    if begins_with_update:
        return step
    passes.meet("update", arrived[-1][1])
    met = passes.now if machine.host_waits else 0.0
    at_end = [each for each in arrived if each[0] not in later]
    _update(step, update, setup, at_end, passes.beside_update, met, streamed)
    return step


def _stream(step: Step, one: _Seconds, unit: int, *after: float) -> float:
    """Stream the states of a unit through the device, chunk by chunk. Returns when its weights have been updated."""
    arrived = step.do("in", f"states {unit}", one.stream, *after)
    first = arrived - one.stream * (1 - 1 / one.chunks)
    updated = step.do("update", f"update {unit}", one.streamed_update, first)
    left = step.do("out", f"updated states {unit}", one.stream, first)
    return max(updated, left, arrived + one.stream / one.chunks)


def _update(
    step: Step,
    one: _Seconds,
    setup: Setup,
    arrived: list[tuple[int, float]],
    first: list[int],
    met: float,
    streamed: set[int],
) -> dict[int, float]:
    """Update one sub-group after another: first the units in `first`, which the next forward needs first, then the
    others in the order of their gradients. Nothing starts before `met`. The device updates those that are `streamed`.

    Returns:
        When each unit's updated weights have been gathered.
    """
    gathered: dict[int, float] = {}
    if not arrived:
        return gathered
    norm = max(met, arrived[-1][1] if setup.clips else 0.0)
    arrived = sorted(arrived, key=lambda each: first.index(each[0]) if each[0] in first else len(first))
    reads = iter([unit for unit, _ in arrived])
    ahead = _read_states(step, one, setup, next(reads))
    for unit, gradient in arrived:
        here, ahead = ahead, _read_states(step, one, setup, next(reads, None))
        if unit in streamed:
            updated = _stream(step, one, unit, gradient, norm, here)
        else:
            updated = step.do("host", f"update {unit}", one.host_update, gradient, norm, here)
            updated = step.do("compute", f"update {unit}", one.update, updated)
        if setup.disk_optimizer:
            step.do("disk", f"states {unit} back", one.states, updated)
        if setup.offload_optimizer and not setup.offload_parameters and unit not in streamed:
            updated = step.do("in", f"updated weights {unit}", one.take, updated)
        gathered[unit] = step.do("collectives", f"gather updated {unit}", one.gather_updated, updated)
        if unit in first:
            step.do("collectives", f"gather {unit}", one.gather, updated)
    return gathered


def _read_states(step: Step, one: _Seconds, setup: Setup, unit: int | None) -> float:
    """Read the states of the next sub-group during the update of this one."""
    if unit is None or not setup.disk_optimizer:
        return 0.0
    return step.do("disk", f"states {unit}", one.states)
