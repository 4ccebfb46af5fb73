"""What a config sends per update, within hosts and across, and what it would send with other keys of ZeRO++."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hf_zero.config import ConfigError, Findings, Problem
from hf_zero.config.checks import model_dtype
from hf_zero.config.choices.groups import gather_size_in, shard_size_in
from hf_zero.config.schema.root import HfZero
from hf_zero.config.schema.zero import Zero
from hf_zero.layout.traffic import Sizes, Wiring, across_bytes, traffic_of, with_same_weights, within_bytes
from hf_zero.quantities import count_of

THIS = "this config"
_UNIT_NUMEL = 1 << 30  # of a model whose size is not known: everything is in proportion


@dataclass(frozen=True, slots=True)
class Links:
    """Bytes per second of one rank, in one direction: to ranks of its host, and to others."""

    within: float = 370e9
    across: float = 40e9


@dataclass(frozen=True, slots=True)
class Sent:
    """Of one rank, per update.

    Attributes:
        within, across: bytes, or models where the number of parameters is not known.
        seconds: on the given links, one byte after the other; None where there are no bytes.
    """

    name: str
    within: float
    across: float
    seconds: float | None


def number_of(text: str, flag: str) -> float:
    """7b, 350M, 40G, 1.5e9."""
    found = count_of(text)
    if found is None:
        raise ConfigError(Problem(flag, text, "must be a number, as 7b, 350M or 1.5e9", "correct it"))
    return found


def traffic_rows(findings: Findings, per_host: int | None, parameters: float | None, links: Links) -> tuple[Sent, ...]:
    """This config first, then what differs from it in nothing but groups and messages; empty for one rank.

    Raises:
        ConfigError: when ranks do not fill hosts.
    """
    ranks = findings.world_size
    if ranks == 1:
        return ()
    per_host = per_host or ranks
    if per_host < 1 or ranks % per_host:
        rule = f"{ranks} ranks do not fill hosts of {per_host}"
        raise ConfigError(Problem("--gpus-per-node", per_host, rule, "give a divisor of --world-size"))
    sizes = _sizes(findings, parameters)
    unit = 1.0 if parameters is not None else 1 / (_UNIT_NUMEL * sizes.weight_bytes)
    return tuple(_sent(name, sizes, wiring, unit, links) for name, wiring in _variants(_wiring(findings, per_host)))


def _sizes(findings: Findings, parameters: float | None) -> Sizes:
    zero = findings.config.zero_optimization or Zero()
    num = int(parameters) if parameters is not None else _UNIT_NUMEL
    each = 4 if model_dtype(findings.config) == "fp32" else 2
    # What is said in elements is in no proportion to a model of unknown size.
    kept = min(num, zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance // 2) if parameters else 0
    communication = findings.config.communication_data_type
    sent = each if communication is None else 4 if communication == "fp32" else 2
    num //= findings.tensor_size  # a rank's part of the matrices; the few parameters that are not cut are small
    return Sizes(gathered=num, trained=num, kept=kept, weight_bytes=each, gradient_bytes=sent)


def _wiring(findings: Findings, per_host: int) -> Wiring:
    zero, own = findings.config.zero_optimization or Zero(), findings.config.hf_zero or HfZero()
    ranks, per_host = with_same_weights(findings.world_size, per_host, findings.tensor_size)
    shard, second = shard_size_in(zero, own), gather_size_in(zero, own)
    return Wiring(
        ranks=ranks,
        per_host=per_host,
        stage=zero.stage,
        shard=per_host if shard == "host" else shard,
        second_shard=1 if second is None else min(per_host if second == "host" else second, ranks),
        quantized_weights=zero.zero_quantized_weights and zero.stage == 3,
        gradient_bits=own.quantized_gradient_bits if zero.zero_quantized_gradients and zero.stage == 3 else None,
        accumulation=findings.batch.accumulation_steps if findings.batch is not None else 1,
        hops=2 if own.hops == 2 else 1,
    )


def _variants(this: Wiring) -> Iterator[tuple[str, Wiring]]:
    yield THIS, this
    plain = replace(this, shard=None, second_shard=1, quantized_weights=False, gradient_bits=None)
    local = this.per_host if 1 < this.per_host < this.ranks else 0
    if this != plain:
        yield f"plain stage {this.stage}", plain
    if this.stage >= 1 and local:
        yield f"hybrid, shards over {local} ranks", replace(plain, shard=local)
    if this.stage != 3:
        return
    if local:
        yield f"zero_hpz_partition_size {local}", replace(plain, second_shard=local)
    yield "zero_quantized_weights", replace(plain, quantized_weights=True)
    yield "zero_quantized_gradients", replace(plain, gradient_bits=this.gradient_bits or 4)
    everything = replace(plain, second_shard=local or 1, quantized_weights=True, gradient_bits=this.gradient_bits or 4)
    yield "all of ZeRO++", everything


def _sent(name: str, sizes: Sizes, wiring: Wiring, unit: float, links: Links) -> Sent:
    transfers = traffic_of(sizes, wiring)
    within, across = within_bytes(transfers), across_bytes(transfers)
    seconds = within / links.within + across / links.across if unit == 1.0 else None
    return Sent(name, within * unit, across * unit, seconds)
