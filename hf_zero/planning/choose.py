"""Memory and step time of every candidate, and the choice among them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import nn

from hf_zero.config import ConfigDict, ConfigError, OptimizerPolicy, Problem, resolve
from hf_zero.config.draft import value_in, with_value
from hf_zero.config.policies import Resolved
from hf_zero.config.schema.long_sequences import ActivationCheckpointing, on_host
from hf_zero.config.schema.long_sequences import Tiling as TilingKeys
from hf_zero.layout.traffic import ModelSizes, Traffic, Transfer, Wiring, exchanges_of, traffic_of, with_same_weights
from hf_zero.log import tracked
from hf_zero.optim.registry import build_optimizer, states_per_element, stored_bytes_per_element
from hf_zero.planning.candidates import (
    Candidate,
    Training,
    candidate_of,
    candidates,
    check_sizes,
    ds_config,
    given_config,
    resolved,
)
from hf_zero.planning.event_model import Setup, Shape, Step, exchange_seconds, simulate
from hf_zero.planning.machine import Hardware
from hf_zero.planning.memory import KINDS, OptimizerSize, RankMemory, Setting, rank_memory
from hf_zero.planning.model import PlannedModel, TilingChoice, trace
from hf_zero.planning.trace import ModelTrace, in_place_of
from hf_zero.precision import precision_from

ALIKE = 1.05  # rates closer than this ratio are too close to distinguish
_RATIO = ("zero_optimization", "offload_optimizer", "ratio")
_RATIO_STEP = 0.05
_LEAST_RATIO = 0.05  # less is as much as no offload
_STREAMED = "yours: offloaded updates are timed as if the CPU ran them all, whatever hf_zero.offload_update says"
_ROUNDED = "yours: ZeRO++'s quantized messages are counted in the bytes sent, but not in memory and time"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate of one candidate.

    Attributes:
        training: with the batch of this estimate.
        config: its ds.json.
        seconds: time of a step (an update).
        bound: the lane that is busy longest.
        lacks: what does not fit, as text; empty if everything fits.
    """

    candidate: Candidate
    training: Training
    config: dict[str, Any]
    memory: RankMemory
    traffic: Traffic
    seconds: float
    bound: str
    flops: float
    lacks: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return not self.lacks

    def tokens_per_s(self, ranks: int) -> float:
        return self.training.tokens * self.training.data_ranks(ranks) / self.seconds


@dataclass(frozen=True, slots=True)
class RankedPlans:
    """All candidates in order of preference, each with its best batch, and the chosen one (None: nothing fits).

    Attributes:
        training: what was asked for, perhaps without a batch.
        yours: the user's ds.json, without and with gradient checkpointing if both are tried.
    """

    model: PlannedModel
    hardware: Hardware
    training: Training
    estimates: tuple[Estimate, ...]
    chosen: Estimate | None
    refused: tuple[str, ...]
    notes: tuple[str, ...]
    yours: tuple[Estimate, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether any candidate fits. (None is chosen either if no trial of `--measure` has completed.)"""
        return any(each.fits for each in self.estimates)

    @property
    def rows(self) -> tuple[Estimate, ...]:
        return (*self.yours, *self.estimates)


def plan(model: PlannedModel, hardware: Hardware, training: Training, given: ConfigDict | None = None) -> RankedPlans:
    """Estimate all candidates and choose.

    Args:
        model: cut for `training.tensor_parallel` ranks, with experts distributed over `training.expert_parallel`.
        given: the user's ds.json, consistent with `training`.

    Raises:
        ConfigError: no candidate has a valid config (the error is that of the first one), or ranks cannot share the
            model's sequences.
    """
    sizes = training.tensor_parallel, training.expert_parallel
    assert (model.tensor_size, model.expert_size) == sizes, "the model is of another plan"
    check_sizes(training, hardware.ranks)
    model.check_shares(training.sequence_parallel)
    batches = tuple(training.batches(hardware.ranks))
    if not batches:
        raise _indivisible(training, hardware.ranks)
    traces: dict[bool, ModelTrace] = {}  # of the first batch
    tried: list[Sequence[Estimate]] = []
    refused: dict[str, ConfigError] = {}
    alike, per_host = with_same_weights(hardware.ranks, hardware.per_host, training.tensor_parallel)
    ways = list(candidates(training, ranks=alike, separate=hardware.separate, per_host=per_host))
    for candidate in tracked(ways, "estimating"):
        try:
            tried.append(_of_candidate(model, hardware, batches, candidate))
            first = _seen(model, hardware, batches[0], candidate)
            traces.setdefault(candidate.checkpointing, first)
        except ConfigError as error:
            refused[candidate.name] = error
    if not tried and refused:
        raise next(iter(refused.values()))
    notes = [*model.notes, *hardware.notes, *dict.fromkeys(each.note for each in traces.values() if each.note)]
    reasons = tuple(f"{name}: {error.problems[0].rule}" for name, error in refused.items())
    yours = () if given is None else tuple(given_estimates(model, hardware, training, given))
    notes += [_of_experts(model, hardware, batches[0], traces)] if training.expert_parallel > 1 else []
    notes += [_ROUNDED] if any(_rounds(each.config) for each in yours) else []
    notes += [_STREAMED] if any(_streams_updates(each.config) for each in yours) else []
    estimates, chosen = choose(tried, hardware.ranks)
    return RankedPlans(model, hardware, training, tuple(estimates), chosen, reasons, tuple(notes), yours)


def _indivisible(training: Training, ranks: int) -> ConfigError:
    shown, data_ranks = training.global_batch, training.data_ranks(ranks)
    per = data_ranks * training.micro_batch
    rule = f"global batch = micro-batch x accumulation x data ranks does not hold: {shown} != n x {per}"
    return ConfigError(Problem("--global-batch", shown, rule, f"give a multiple of {per}"))


def _of_candidate(
    model: PlannedModel, hardware: Hardware, batches: Sequence[Training], candidate: Candidate
) -> list[Estimate]:
    """Estimate a candidate with every batch that fits, and with the least ratio of offloaded states."""

    def at(training: Training) -> list[Estimate]:
        whole = estimated(model, hardware, training, candidate)
        if candidate.optimizer != "cpu" or candidate.streams or not whole.fits:
            return [whole]
        least = _least_ratio(whole, estimated(model, hardware, training, replace(candidate, ratio=0.0)), hardware)
        if not _LEAST_RATIO <= least < 1:
            return [whole]
        part = estimated(model, hardware, training, replace(candidate, ratio=least))
        return [whole, part] if part.fits else [whole]

    return _that_fit(at, batches)


def _that_fit(at: Callable[[Training], list[Estimate]], batches: Sequence[Training]) -> list[Estimate]:
    """Estimates of the batches that fit, in this order, ascending; also of the largest between the last of them and the
    first that does not. If none fits, those of the first batch."""
    found: list[Estimate] = []
    for place, training in enumerate(batches):
        ones = at(training)
        if not ones[0].fits:
            if not place:
                return ones
            return found + _largest_between(at, batches[place - 1], training)
        found += ones
    return found


def _largest_between(at: Callable[[Training], list[Estimate]], fits: Training, does_not: Training) -> list[Estimate]:
    """Estimates of the largest micro-batch between two, with the same accumulation; [] if there is none that fits."""
    if fits.accumulation != does_not.accumulation:  # of a global batch every micro-batch has been tried
        return []
    low, high, best = fits.micro_batch, does_not.micro_batch, list[Estimate]()
    while high - low > 1:
        middle = replace(fits, micro_batch=(low + high) // 2)
        ones = at(middle)
        if ones[0].fits:
            low, best = middle.micro_batch, ones
        else:
            high = middle.micro_batch
    return best


def _least_ratio(whole: Estimate, none: Estimate, hardware: Hardware) -> float:
    """The least ratio with which the device is not full, by its memory with all states and without any."""
    most, least = none.memory.device_total, whole.memory.device_total
    needed = (most - hardware.limit) / max(1, most - least)
    return min(1.0, round(math.ceil(max(0.0, needed) / _RATIO_STEP) * _RATIO_STEP, 2))


def estimated(model: PlannedModel, hardware: Hardware, training: Training, candidate: Candidate) -> Estimate:
    """Estimate a candidate with the batch of `training`.

    Raises:
        ConfigError: the candidate's config is invalid.
    """
    config = ds_config(candidate, training)
    answers = resolved(config, training, model, hardware.ranks)
    seen = _seen(model, hardware, training, candidate)
    return _estimate(model, hardware, training, candidate, config, answers, seen)


def _seen(model: PlannedModel, hardware: Hardware, training: Training, candidate: Candidate) -> ModelTrace:
    return traced(model, training, checkpointing=candidate.checkpointing, on_cpu=not hardware.separate)


def _of_experts(model: PlannedModel, hardware: Hardware, training: Training, traces: Mapping[bool, ModelTrace]) -> str:
    tokens, size = training.micro_batch * training.local_length, model.dtype.itemsize
    sent = [
        f"{Traffic.of(_exchanges(hardware, training, seen)).total / tokens:,.0f}"
        + " with checkpointing" * checkpointing
        for checkpointing, seen in traces.items()
    ]
    whole, trained = (numel * model.expert_size for numel in model.apart)
    sizes = ModelSizes(gathered=whole, trained=trained, weight_bytes=size, gradient_bytes=size)
    plain = Traffic.of(traffic_of(sizes, Wiring(ranks=hardware.ranks, per_host=hardware.per_host))).total
    return (
        f"experts over {model.expert_size} ranks, evenly routed: per token a rank sends {' or '.join(sent)} bytes in "
        f"forward and backward, instead of {plain / tokens:,.0f} for stage 3's gathers and reductions of all experts"
    )


def given_estimates(
    model: PlannedModel, hardware: Hardware, training: Training, given: ConfigDict
) -> Iterator[Estimate]:
    """Estimate the user's ds.json, without and with checkpointing unless `training` decides; for a ratio of "auto" with
    the least number that fits.

    Raises:
        ConfigError: the config is invalid.
    """

    def at(training: Training, checkpointing: bool) -> list[Estimate]:
        config = given_config(given, training)
        whole = estimate(config, training, checkpointing)
        if not hardware.separate or value_in(config, _RATIO) != "auto" or not whole.fits:
            return [whole]
        none = estimate(with_value(config, _RATIO, 0.0), training, checkpointing)
        least = _least_ratio(whole, none, hardware)
        part = estimate(with_value(config, _RATIO, least), training, checkpointing)
        return [part if part.fits else whole]

    def estimate(config: dict[str, Any], training: Training, checkpointing: bool) -> Estimate:
        answers = resolve(
            config,
            model=model.view,
            world_size=hardware.ranks,
            sequence_size=training.sequence_parallel,
            tensor_size=training.tensor_parallel,
        )
        keys = answers.section(TilingKeys)
        tiling = TilingChoice(mlp=keys.tiled_mlp, loss=keys.tiled_loss)
        seen = traced(model, training, checkpointing=checkpointing, tiling=tiling, on_cpu=not hardware.separate)
        candidate = candidate_of(answers, checkpointing=checkpointing)
        return _estimate(model, hardware, training, candidate, config, answers, seen)

    for way in (False, True) if training.checkpointing is None else (training.checkpointing,):
        ones = _that_fit(partial(at, checkpointing=way), list(training.batches(hardware.ranks)))
        yield from choose([ones], hardware.ranks)[0]


def _rounds(config: dict[str, Any]) -> bool:
    zero = config.get("zero_optimization") or {}
    return any(zero.get(f"zero_quantized_{what}") for what in ("weights", "gradients"))


def _streams_updates(config: dict[str, Any]) -> bool:
    return bool((config.get("hf_zero") or {}).get("offload_update", "cpu") != "cpu")


@lru_cache(maxsize=64)  # candidates share traces, and `remedies` needs them again
def traced(
    model: PlannedModel,
    training: Training,
    *,
    checkpointing: bool,
    tiling: TilingChoice | None = None,
    on_cpu: bool = False,
) -> ModelTrace:
    return trace(
        model,
        micro_batch=training.micro_batch,
        length=training.length,
        checkpointing=checkpointing,
        tiling=tiling or TilingChoice(),
        sequence_size=training.sequence_parallel,
        on_cpu=on_cpu,
    )


def choose(tried: Sequence[Sequence[Estimate]], ranks: int) -> tuple[list[Estimate], Estimate | None]:
    """Choose among the estimates of candidates, each with ascending batches, by tokens per second.

    Returns:
        one estimate of each candidate, and the chosen one: the first candidate, in order of preference, that is about
        as fast as the fastest of all, with the smallest batch that is. Other candidates have the smallest batch that is
        about as fast as their own best.
    """

    def rate(one: Estimate) -> float:
        return one.tokens_per_s(ranks) if one.fits else 0.0

    most = max((rate(one) for ones in tried for one in ones), default=0.0)
    rows = []
    for ones in tried:
        own = max(map(rate, ones))
        wanted = most if own * ALIKE >= most else own
        rows.append(next(one for one in ones if rate(one) * ALIKE >= wanted))
    return rows, next((one for one in rows if one.fits and rate(one) * ALIKE >= most), None)


def _estimate(
    model: PlannedModel,
    hardware: Hardware,
    training: Training,
    candidate: Candidate,
    config: dict[str, Any],
    answers: Resolved,
    seen: ModelTrace,
) -> Estimate:
    setting = setting_of(answers, training, hardware)
    if setting.shard_ranks % model.expert_size:
        equation = f"{setting.shard_ranks} != n x {model.expert_size}"
        rule = f"ranks per shard group = n x ranks along expert does not hold: {equation}"
        raise ConfigError(Problem("--expert-parallel", model.expert_size, rule, "give a divisor of the shard group"))
    memory = rank_memory(model, setting, seen)
    goes_out = answers.section(ActivationCheckpointing).cpu_checkpointing
    if candidate.checkpointing and goes_out and hardware.separate:
        memory = memory.with_activations_on_host(kept_by_layers(model, training))
    step = _step(model, hardware, training, answers, seen, recomputes=candidate.checkpointing)
    exchanges = _exchanges(hardware, training, seen, training.accumulation)
    return Estimate(
        candidate,
        training,
        config,
        memory,
        traffic=Traffic.of([*_of_states(model, hardware, answers), *exchanges]),
        seconds=step.seconds,
        bound=step.bound,
        flops=seen.flops * training.accumulation,
        lacks=tuple(_lacks(memory, hardware)),
    )


def kept_by_layers(model: PlannedModel, training: Training) -> int:
    """Bytes of inputs that `activation_checkpointing.cpu_checkpointing` moves to host memory."""
    tokens = training.micro_batch * training.local_length
    return on_host(tokens * model.hidden * model.dtype.itemsize, model.layers)


def _exchanges(hardware: Hardware, training: Training, seen: ModelTrace, accumulation: int = 1) -> list[Transfer]:
    return exchanges_of(seen.messages, group=training.exchanging, per_host=hardware.per_host, accumulation=accumulation)


def _of_states(model: PlannedModel, hardware: Hardware, answers: Resolved) -> list[Transfer]:
    size, (apart, trained_apart) = model.dtype.itemsize, model.apart
    rest = model.num_stored - apart
    sizes = ModelSizes(
        gathered=rest,
        trained=model.num_trained - trained_apart,
        kept=min(rest, answers.zero.keys.stage3_max_live_parameters),
        weight_bytes=size,
        gradient_bytes=size,
    )
    ranks, per_host = with_same_weights(hardware.ranks, hardware.per_host, answers.tensor_size)
    shard = shard_ranks(answers, hardware)
    wiring = Wiring(
        ranks=ranks,
        per_host=per_host,
        stage=answers.zero.stage,
        accumulation=answers.batch.accumulation_steps,
        shard=shard,
        second_shard=second_shard(answers, hardware),
        quantized_weights=answers.zero.keys.zero_quantized_weights and answers.zero.stage == 3,
        gradient_bits=answers.zero.gradient_bits,
        hops=2 if answers.zero.hops == 2 else 1,
    )
    transfers = traffic_of(sizes, wiring)
    if apart:  # expert gradients are reduced among the ranks with the same experts
        stays = answers.zero.stage == 3
        trained, persistent = (0, trained_apart) if stays else (trained_apart, 0)
        ranks, per_host = with_same_weights(hardware.ranks, hardware.per_host, model.expert_size)
        shard //= model.expert_size
        alike = replace(wiring, ranks=ranks, per_host=per_host, shard=shard, second_shard=1, gradient_bits=None)
        transfers += traffic_of(replace(sizes, gathered=0, kept=0, trained=trained, persistent=persistent), alike)
    return transfers


def setting_of(answers: Resolved, training: Training, hardware: Hardware) -> Setting:
    size = optimizer_size(training.optimizer)
    return Setting(answers, size, shard_ranks(answers, hardware), hardware.separate, hardware.hosts)


def shard_ranks(answers: Resolved, hardware: Hardware) -> int:
    """Ranks that share the states of one copy of the model."""
    ranks, per_host = with_same_weights(hardware.ranks, hardware.per_host, answers.tensor_size)
    size = answers.zero.shard_size
    return ranks if size is None else per_host if size == "host" else size


def second_shard(answers: Resolved, hardware: Hardware) -> int:
    """Size of the groups that gather parameters (hpZ); 1: all ranks that share the states."""
    _, per_host = with_same_weights(hardware.ranks, hardware.per_host, answers.tensor_size)
    size = answers.zero.gather_size
    return 1 if size is None else min(per_host if size == "host" else size, shard_ranks(answers, hardware))


def _step(
    model: PlannedModel,
    hardware: Hardware,
    training: Training,
    answers: Resolved,
    seen: ModelTrace,
    *,
    recomputes: bool,
) -> Step:
    zero, shard = answers.zero, shard_ranks(answers, hardware)
    optimizer, parameters = zero.offload_optimizer, zero.offload_param if zero.stage == 3 else None
    tokens, machine = training.micro_batch * training.local_length, hardware.machine()
    flops, touched, (apart, _) = seen.forward_flops / tokens, seen.forward_touched / tokens, model.apart
    numel, layers = model.num_stored - apart, max(1, model.layers)
    shape = Shape(model.name, numel, layers, flops=flops, apart=apart, touched=touched)
    in_fp32 = precision_from(answers.precision).model is None and answers.precision.autocast is None
    if hardware.separate and in_fp32:
        machine = replace(machine, flops=machine.flops * hardware.gpu.fp32)
    exchange = {"forward": 0.0, "backward": 0.0}
    for each in _exchanges(hardware, training, seen):
        exchange[each.phase] += exchange_seconds(machine, each.operation, each.within, each.across)
    setup = Setup(
        stage=zero.stage,
        offload_optimizer=optimizer is not None and hardware.separate,
        offload_parameters=parameters is not None and hardware.separate,
        offload_ratio=1.0 if optimizer is None else optimizer.first_ratio,
        tokens=tokens * training.accumulation,
        recomputes=recomputes,
        clips=_waits(answers),
        streams=zero.streaming is not None,
        overlaps_step=zero.overlap_step,
        trained=model.num_trained / max(1, model.num_stored),
        micro_batches=training.accumulation,
        disk_optimizer=optimizer is not None and optimizer.device == "nvme",
        disk_parameters=parameters is not None and parameters.device == "nvme",
        shard=shard,
        second_shard=second_shard(answers, hardware),
        tensor=training.tensor_parallel,
        experts=training.expert_parallel,
        exchange=(exchange["forward"], exchange["backward"]),
        gathers=zero.keys,
        agreement=_agreement(answers, hardware),
    )
    return simulate(machine, shape, setup)


def _waits(answers: Resolved) -> bool:
    """Whether updates start only after all gradients are complete."""
    clip_norm, skips, streaming = answers.gradients.clip_norm, answers.precision.skip_nonfinite, answers.zero.streaming
    return clip_norm > 0 or skips if streaming is None else bool(streaming.why_gradients_stay(clip_norm, skips))


def _agreement(answers: Resolved, hardware: Hardware) -> Literal["plan", "memory", "messages"]:
    if not hardware.separate and hardware.hosts == 1:
        return "memory"
    return "plan" if answers.zero.follows_plans else "messages"


def _lacks(memory: RankMemory, hardware: Hardware) -> Iterator[str]:
    per_host = hardware.per_host
    if memory.device_total > hardware.limit:
        largest = max(KINDS, key=lambda kind: memory.device.get(kind, 0))
        yield (
            f"{gigabytes(memory.device_total)} of device memory ({gigabytes(memory.device[largest])} of it {largest}); "
            f"{gigabytes(hardware.limit)} can be used"
        )
    if memory.host_total * per_host > hardware.host_limit and hardware.separate:
        yield (
            f"{gigabytes(memory.host_total * per_host)} of host memory for {per_host} rank(s) per host; "
            f"{gigabytes(hardware.host_limit)} can be used"
        )
    if memory.disk_total * per_host > hardware.disk:
        yield f"{gigabytes(memory.disk_total * per_host)} on a host's drive; {gigabytes(hardware.disk)} can be used"


def gigabytes(size: float) -> str:
    """Format a size, such as 1.2 GB or 35 MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


@lru_cache(maxsize=4)
def optimizer_size(name: str) -> OptimizerSize:
    """Measure the states per element of the optimizer of this type on one small parameter."""
    policy = OptimizerPolicy(type=name, params={"lr": 1e-3} if name.lower() != "adafactor" else {})
    plain = inspect.unwrap(torch.optim.Optimizer.add_param_group)  # its wrapper imports torch's compiler
    with in_place_of((torch.optim.Optimizer, "add_param_group", plain)):
        optimizer = build_optimizer(policy, [{"params": [nn.Parameter(torch.zeros(2, 2))]}])
    return OptimizerSize(states_per_element(optimizer), stored_bytes_per_element(optimizer))
