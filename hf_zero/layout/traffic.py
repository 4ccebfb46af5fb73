"""Formulas for the traffic of one rank per update, within its host and across hosts. Integers only, no torch.

    gather, reduce-scatter, exchange     payload P over n ranks: each receives P * (n - 1) / n, 1/n from every other
    all-reduce                           reduce-scatter, then gather
    a message instead of values          `hf_zero.kernels.message.message_bytes` of a rank's row

    per update, k micro-batches                 forward     backward    gradients                       after the step
    stage 0                                     -           -           all-reduce                      -
    stages 1, 2                                 -           -           reduce-scatter (2: k times)     gather
    stage 3                                     k gathers   k gathers   k reduce-scatters               persistent ones
    + zero_hpz_partition_size p                 k in p      k in p                                      1/p, across
    + zero_quantized_weights                    in 8 bits   in 8 bits
    + zero_quantized_gradients                                          k exchanges in a host, k across
    shards in groups of s (MiCS, HSDP)          in s        in s        in s; shards all-reduced once   in s
    hops 2, below stage 3, g ranks on a host                            in g, and 1/g across            1/g across, in g
    tensor and sequence parallelism             activations: `exchanges_of`, from the model's messages
    expert parallelism                          4 rows for each expert of a token (6: layers checkpointed), 1/ranks stay

Planning (`explain`, estimates of memory and time) calls `traffic_of`. `Transfer.payload` equals the ledger's count
(`hf_zero.comm.ledger`) for the same call, except padding of rows. docs/hybrid_and_zeropp.md has the formulas and
measured bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hf_zero.kernels.message import message_bytes

WEIGHT_BITS = 8  # per element of a quantized gather


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Sizes of a model, in elements and bytes.

    Attributes:
        gathered: parameters that stage 3 gathers around their use; at other stages all trained parameters.
        trained: number of these with gradients.
        persistent: other trained parameters, which stay gathered at stage 3.
        kept: the part of `gathered` that stays gathered from forward to backward.
        weight_bytes: bytes of a gathered element.
        gradient_bytes: bytes of a reduced element.
    """

    gathered: int
    trained: int
    persistent: int = 0
    kept: int = 0
    weight_bytes: int = 2
    gradient_bytes: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """The groups of ranks and the encoding of their messages.

    Attributes:
        per_host: number of ranks per host, which are consecutive.
        shard: number of ranks that shard one copy of the states; None: all.
        second_shard: number of ranks of hpZ's group, which gather among themselves; 1: off.
        quantized_weights, gradient_bits: as in ds.json; None: gradients are not quantized.
        accumulation: micro-batches per update.
        hops: below stage 3, the hops of reductions and gathers over several hosts.
    """

    ranks: int
    per_host: int
    stage: int = 3
    shard: int | None = None
    second_shard: int = 1
    quantized_weights: bool = False
    gradient_bits: int | None = None
    accumulation: int = 1
    hops: int = 1

    @property
    def shard_ranks(self) -> int:
        return self.shard or self.ranks


@dataclass(frozen=True, slots=True)
class Transfer:
    """Collectives of one kind in an update.

    Attributes:
        phase, operation: as the ledger books them.
        group: number of participating ranks.
        payload: bytes of the whole buffers, as the ledger counts them.
        within, across: bytes that a rank receives (and sends) from ranks of its host, and of others.
    """

    phase: str
    operation: str
    group: int
    payload: int
    within: int
    across: int


def traffic_of(sizes: ModelSizes, wiring: Wiring) -> list[Transfer]:
    """All significant transfers of one update."""
    return [each for each in _transfers(sizes, wiring) if each.payload and each.group > 1]


@dataclass(frozen=True, slots=True)
class Message:
    """Activations or their gradients, sent between tensor- or sequence-parallel ranks.

    Attributes:
        phase, operation: as the ledger books them.
        payload: bytes of the whole buffers per micro-batch.
    """

    phase: str
    operation: str
    payload: int


def exchanges_of(messages: Iterable[Message], *, group: int, per_host: int, accumulation: int = 1) -> list[Transfer]:
    """Activations that an update sends among `group` consecutive ranks."""
    wiring = Wiring(ranks=group, per_host=per_host)
    return [
        _collective(each.phase, each.operation, each.payload * accumulation, group, 1, wiring)
        for each in messages
        if group > 1
    ]


def with_same_weights(ranks: int, per_host: int, model_size: int) -> tuple[int, int]:
    """(ranks with the same parts of the weights, of these on one host); `model_size` consecutive ranks hold all."""
    return ranks // model_size, max(1, per_host // model_size)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one rank per update."""

    within: int = 0
    across: int = 0

    @property
    def total(self) -> int:
        return self.within + self.across

    @classmethod
    def of(cls, transfers: list[Transfer]) -> Traffic:
        return cls(within_bytes(transfers), across_bytes(transfers))


def across_bytes(transfers: list[Transfer]) -> int:
    """Bytes that a rank receives from other hosts."""
    return sum(each.across for each in transfers)


def within_bytes(transfers: list[Transfer]) -> int:
    """Bytes that a rank receives from its own host."""
    return sum(each.within for each in transfers)


def _transfers(sizes: ModelSizes, wiring: Wiring) -> Iterator[Transfer]:
    if wiring.stage == 3:
        yield from _gathers(sizes, wiring)
        yield from _persistent(sizes, wiring)
    reductions = wiring.accumulation if wiring.stage >= 2 else 1
    gradients = sizes.trained * sizes.gradient_bytes
    if wiring.stage == 0:
        yield from _in_hops("backward", "all_reduce", gradients, wiring.ranks, wiring)
        return
    if wiring.stage == 3 and wiring.gradient_bits is not None:
        yield from _quantized_reduction(sizes, wiring)
    else:
        shard = wiring.shard_ranks
        yield from _in_hops("backward", "reduce_scatter", gradients * reductions, shard, wiring)
    yield from _replicas(gradients, wiring)
    if wiring.stage < 3:
        weights = sizes.trained * sizes.weight_bytes
        yield from _in_hops("step", "all_gather", weights, wiring.shard_ranks, wiring)


def _in_hops(phase: str, operation: str, payload: int, group: int, wiring: Wiring) -> Iterator[Transfer]:
    """The whole payload within hosts, and one rank's part of it across hosts."""
    local = min(wiring.per_host, group)
    if wiring.hops == 1 or wiring.stage == 3 or local in (1, group):
        yield _collective(phase, operation, payload, group, 1, wiring)
        return
    yield _collective(phase, operation, payload // local, group // local, local, wiring)
    within = ("reduce_scatter", "all_gather") if operation == "all_reduce" else (operation,)
    for transfer in within:
        yield _collective(phase, transfer, payload, local, 1, wiring)


def _gathers(sizes: ModelSizes, wiring: Wiring) -> Iterator[Transfer]:
    shard, second = wiring.shard_ranks, wiring.second_shard
    group = second if 1 < second < shard else shard
    yield _gather("forward", sizes, sizes.gathered, group, wiring)
    yield _gather("backward", sizes, sizes.gathered - sizes.kept, group, wiring)
    if group < shard:  # updated rows are also sent to the ranks that keep them
        updated = sizes.trained * sizes.weight_bytes // group
        yield _collective("step", "all_gather", updated, shard // group, group, wiring)


def _gather(phase: str, sizes: ModelSizes, numel: int, group: int, wiring: Wiring) -> Transfer:
    payload = numel * sizes.weight_bytes
    if wiring.quantized_weights:
        shard = wiring.shard_ranks
        payload = message_bytes(-(-numel // shard), WEIGHT_BITS) * shard
    return _collective(phase, "all_gather", payload * wiring.accumulation, group, 1, wiring)


def _persistent(sizes: ModelSizes, wiring: Wiring) -> Iterator[Transfer]:
    """Transfers of persistent parameters, which are not quantized."""
    gradients = sizes.persistent * sizes.gradient_bytes
    shard = wiring.shard_ranks
    yield _collective("backward", "reduce_scatter", gradients * wiring.accumulation, shard, 1, wiring)
    yield from _replicas(gradients, wiring)
    yield _collective("step", "all_gather", sizes.persistent * sizes.weight_bytes, shard, 1, wiring)


def _replicas(gradients: int, wiring: Wiring) -> Iterator[Transfer]:
    """Sums of shards over the replicas, once per update."""
    shard = wiring.shard_ranks
    if shard < wiring.ranks:
        yield _collective("step", "all_reduce", gradients // shard, wiring.ranks // shard, shard, wiring)


def _quantized_reduction(sizes: ModelSizes, wiring: Wiring) -> Iterator[Transfer]:
    """One hop if the shard group is on one host or has one rank per host; else two hops."""
    assert wiring.gradient_bits is not None
    shard, local, k = wiring.shard_ranks, min(wiring.per_host, wiring.shard_ranks), wiring.accumulation
    row = message_bytes(-(-sizes.trained // shard), wiring.gradient_bits)
    if local in (1, shard):
        yield _collective("backward", "all_to_all", row * shard * k, shard, 1, wiring)
        return
    hosts = shard // local
    yield _collective("backward", "all_to_all", row * shard * k, local, 1, wiring)
    yield _collective("backward", "all_to_all", row * hosts * k, hosts, local, wiring)


def _collective(phase: str, operation: str, payload: int, group: int, stride: int, wiring: Wiring) -> Transfer:
    """`group` ranks, `stride` apart; each receives an equal part of `payload` from every other."""
    local = max(1, min(group, wiring.per_host // stride)) if stride < wiring.per_host else 1
    rounds = 2 if operation == "all_reduce" else 1
    within, across = payload * (local - 1) // group, payload * (group - local) // group
    return Transfer(phase, operation, group, payload, within * rounds, across * rounds)
