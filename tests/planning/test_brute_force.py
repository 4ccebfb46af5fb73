"""The choice of `plan` compared with a search through all micro-batches and ratios of all candidates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hf_zero.config import ConfigError
from hf_zero.planning.candidates import MOST_PER_FORWARD, Candidate, Training, candidates
from hf_zero.planning.choose import ALIKE
from hf_zero.planning.choose import plan as make_plan
from hf_zero.planning.estimate import Estimate
from hf_zero.planning.machine import Hardware, hardware
from hf_zero.planning.model import PlannedModel, load_model

PAIRS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("1b", {"gpu": "4090", "gpus_per_node": 1}, {}),
    ("3b", {"gpu": "4090", "gpus_per_node": 2}, {}),
    ("3b", {"gpu": "a100-40", "gpus_per_node": 1}, {}),
    ("8b", {"gpu": "h100", "gpus_per_node": 1}, {}),
    ("8b", {"gpu": "h100", "gpus_per_node": 2}, {}),
    ("8b", {"gpu": "h100", "gpus_per_node": 8}, {"length": 8192}),
    ("8b", {"gpu": "h100", "gpus_per_node": 8}, {"global_batch": 96}),
    ("8b", {"gpu": "l40s", "gpus_per_node": 4}, {}),
    ("8b", {"gpu": "4090", "gpus_per_node": 2}, {}),
    ("13b", {"gpu": "a100", "gpus_per_node": 4}, {"length": 4096}),
    ("70b", {"gpu": "h100", "gpus_per_node": 8, "host_memory": "2T"}, {}),
    ("70b", {"gpu": "h200", "gpus_per_node": 8, "nodes": 2, "host_memory": "2T"}, {"length": 4096}),
)
RATIOS = tuple(step / 10 for step in range(1, 10))


def all_that_fit(model: PlannedModel, machine: Hardware, training: Training) -> Iterator[Estimate]:
    """Every candidate with every micro-batch and ratio. A larger micro-batch never needs less memory."""
    for candidate in candidates(training, ranks=machine.ranks, separate=machine.separate, per_host=machine.per_host):
        ratios = RATIOS if candidate.optimizer == "cpu" and not candidate.streams else ()
        for way in (candidate, *(replace(candidate, ratio=ratio) for ratio in ratios)):
            yield from with_every_batch(model, machine, training, way)


def with_every_batch(model: PlannedModel, machine: Hardware, training: Training, way: Candidate) -> Iterator[Estimate]:
    for micro in range(1, MOST_PER_FORWARD + 1):
        steps, rest = divmod(training.global_batch or micro * machine.ranks, micro * machine.ranks)
        if rest:
            continue
        try:
            one = Estimate.of(model, machine, replace(training, micro_batch=micro, accumulation=steps), way)
        except ConfigError:
            return
        if not one.fits:
            return
        yield one


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("size", "machine", "batch"), PAIRS, ids=lambda value: str(value))
def test_the_choice_is_about_as_fast_as_the_best_of_all(
    size: str, machine: dict[str, Any], batch: dict[str, Any]
) -> None:
    model, there, training = load_model(size), hardware(machine), Training(**batch)
    best = max(all_that_fit(model, there, training), key=lambda each: each.tokens_per_s)
    chosen = make_plan(model, there, replace(training, searches=True)).chosen
    assert chosen is not None
    words = f"{best.candidate.name} with micro-batch {best.training.micro_batch} and ratio {best.candidate.ratio}"
    assert chosen.tokens_per_s * ALIKE >= best.tokens_per_s, words
