"""Estimates of every candidate, and the choice among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hf_zero.config import ConfigDict, ConfigError, Problem, resolve
from hf_zero.config.draft import value_in, with_value
from hf_zero.layout.traffic import ModelSizes, Traffic, Wiring, traffic_of, with_same_weights
from hf_zero.log import tracked
from hf_zero.planning.candidates import Candidate, Training, candidate_of, candidates, check_sizes, given_config
from hf_zero.planning.estimate import Estimate
from hf_zero.planning.machine import Hardware
from hf_zero.planning.model import PlannedModel

ALIKE = 1.05  # rates closer than this ratio are too close to distinguish
_RATIO = ("zero_optimization", "offload_optimizer", "ratio")
_RATIO_STEP = 0.05
_LEAST_RATIO = 0.05  # less is as much as no offload
_ROUNDED = "yours: ZeRO++'s quantized messages are counted in the bytes sent, but not in memory and time"


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
    firsts: dict[bool, Estimate] = {}  # of the first batch, by whether layers are checkpointed
    tried: list[Sequence[Estimate]] = []
    refused: dict[str, ConfigError] = {}
    alike, per_host = with_same_weights(hardware.ranks, hardware.per_host, training.tensor_parallel)
    ways = list(candidates(training, ranks=alike, separate=hardware.separate, per_host=per_host))
    for candidate in tracked(ways, "estimating"):
        try:
            tried.append(_of_candidate(model, hardware, batches, candidate))
            firsts.setdefault(candidate.checkpointing, tried[-1][0])
        except ConfigError as error:
            refused[candidate.name] = error
    if not tried and refused:
        raise next(iter(refused.values()))
    notes = [*model.notes, *hardware.notes, *dict.fromkeys(filter(None, (each.seen.note for each in firsts.values())))]
    reasons = tuple(f"{name}: {error.problems[0].rule}" for name, error in refused.items())
    yours = () if given is None else tuple(given_estimates(model, hardware, training, given))
    notes += [_of_experts(firsts)] if training.expert_parallel > 1 else []
    notes += [_ROUNDED] if any(_rounds(each.config) for each in yours) else []
    estimates, chosen = choose(tried)
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
        whole = Estimate.of(model, hardware, training, candidate)
        if candidate.optimizer != "cpu" or candidate.streams or not whole.fits:
            return [whole]
        least = _least_ratio(whole, Estimate.of(model, hardware, training, replace(candidate, ratio=0.0)))
        if not _LEAST_RATIO <= least < 1:
            return [whole]
        part = Estimate.of(model, hardware, training, replace(candidate, ratio=least))
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


def _least_ratio(whole: Estimate, none: Estimate) -> float:
    """The least ratio with which the device is not full, by its memory with all states and without any."""
    most, least = none.memory.device_total, whole.memory.device_total
    needed = (most - whole.hardware.limit) / max(1, most - least)
    return min(1.0, round(math.ceil(max(0.0, needed) / _RATIO_STEP) * _RATIO_STEP, 2))


def _of_experts(firsts: Mapping[bool, Estimate]) -> str:
    """A note about what experts send; `firsts`: an estimate by whether layers are checkpointed."""
    each = next(iter(firsts.values()))
    model, hardware, size = each.model, each.hardware, each.model.dtype.itemsize
    tokens = each.training.micro_batch * each.training.local_length
    sent = [
        f"{Traffic.of(first.exchanges()).total / tokens:,.0f}" + " with checkpointing" * checkpointing
        for checkpointing, first in firsts.items()
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
        least = _least_ratio(whole, none)
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
        candidate = candidate_of(answers, checkpointing=checkpointing)
        return Estimate(model, hardware, training, candidate, config, answers)

    for way in (False, True) if training.checkpointing is None else (training.checkpointing,):
        ones = _that_fit(partial(at, checkpointing=way), list(training.batches(hardware.ranks)))
        yield from choose([ones])[0]


def _rounds(config: dict[str, Any]) -> bool:
    zero = config.get("zero_optimization") or {}
    return any(zero.get(f"zero_quantized_{what}") for what in ("weights", "gradients"))


def choose(tried: Sequence[Sequence[Estimate]]) -> tuple[list[Estimate], Estimate | None]:
    """Choose among the estimates of candidates, each with ascending batches, by tokens per second.

    Returns:
        one estimate of each candidate, and the chosen one: the first candidate, in order of preference, that is about
        as fast as the fastest of all, with the smallest batch that is. Other candidates have the smallest batch that is
        about as fast as their own best.
    """

    def rate(one: Estimate) -> float:
        return one.tokens_per_s if one.fits else 0.0

    most = max((rate(one) for ones in tried for one in ones), default=0.0)
    rows = []
    for ones in tried:
        own = max(map(rate, ones))
        wanted = most if own * ALIKE >= most else own
        rows.append(next(one for one in ones if rate(one) * ALIKE >= wanted))
    return rows, next((one for one in rows if one.fits and rate(one) * ALIKE >= most), None)
