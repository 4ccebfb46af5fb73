"""Optimizer and scheduler objects beside the sections of ds.json: which combinations make sense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_zero.config import Other, Problem
from hf_zero.config.errors import ABSENT
from hf_zero.config.sources import is_auto, source_in
from hf_zero.integration.huggingface.views import is_dummy


def object_problems(config: Mapping[str, Any], optimizer: Any, scheduler: Any) -> Iterator[Problem]:
    """What is wrong with the objects given to `prepare`, in view of the sections of the config."""
    if optimizer is not None:
        yield from _optimizer_problems(config, optimizer)
    if scheduler is not None:
        yield from _scheduler_problems(config, scheduler)
    if is_dummy(optimizer, "DummyOptim") and scheduler is not None and not is_dummy(scheduler, "DummyScheduler"):
        yield Problem(
            "scheduler",
            type(scheduler).__name__,
            "only `accelerate.utils.DummyScheduler` can go with `accelerate.utils.DummyOptim`: a schedule of the "
            "script cannot drive an optimizer that the engine is yet to build",
            "use DummyScheduler(optimizer, lr_scheduler_callable=lambda optimizer: ...) with the same schedule in it",
        )


def _optimizer_problems(config: Mapping[str, Any], optimizer: Any) -> Iterator[Problem]:
    dummy = is_dummy(optimizer, "DummyOptim")
    if _has(config, "optimizer") and not dummy:
        yield _given_twice(config, "optimizer", optimizer, "accelerate.utils.DummyOptim")
    elif dummy and not _has(config, "optimizer"):
        yield Problem(
            "optimizer",
            ABSENT,
            "you cannot create a `DummyOptim` without an optimizer section in the config, whose placeholder it is",
            'add "optimizer": {"type": "AdamW", "params": {"lr": "auto"}} to the config, or give a torch optimizer',
            other=Other("given to prepare()", "DummyOptim", "the script"),
        )


def _scheduler_problems(config: Mapping[str, Any], scheduler: Any) -> Iterator[Problem]:
    dummy = is_dummy(scheduler, "DummyScheduler")
    made_later = dummy and scheduler.lr_scheduler_callable is not None
    if _has(config, "scheduler") and not dummy:
        yield _given_twice(config, "scheduler", scheduler, "accelerate.utils.DummyScheduler")
    elif dummy and not made_later and not _has(config, "scheduler"):
        yield Problem(
            "scheduler",
            ABSENT,
            "DummyScheduler is a placeholder for the config's scheduler section, and there is none",
            'add "scheduler": {"type": "WarmupDecayLR", "params": {...}} to the config, or pass '
            "`lr_scheduler_callable` to DummyScheduler",
            other=Other("given to prepare()", "DummyScheduler", "the script"),
        )
    elif dummy and not made_later and scheduler.total_num_steps is None:
        yield from _unknown_total(config)


def _unknown_total(config: Mapping[str, Any]) -> Iterator[Problem]:
    params = config["scheduler"].get("params") if isinstance(config["scheduler"], Mapping) else None
    if isinstance(params, Mapping) and is_auto(params.get("total_num_steps")):
        path = "scheduler.params.total_num_steps"
        yield Problem(
            path,
            "auto",
            "the number of updates is unknown",
            "pass DummyScheduler(optimizer, total_num_steps=...), or write the number in the config",
            origin=str(source_in(config, path)),
        )


def _given_twice(config: Mapping[str, Any], section: str, thing: Any, stand_in: str) -> Problem:
    inside = config[section]
    kind = inside.get("type") if isinstance(inside, Mapping) else inside
    return Problem(
        section,
        kind,
        f"the {section} is given in the config and in the code at the same time",
        f"remove the section {section} from the config, or create `{stand_in}` in the code",
        origin=str(source_in(config, section)),
        other=Other("given to prepare()", type(thing).__name__, "the script"),
    )


def _has(config: Mapping[str, Any], section: str) -> bool:
    return config.get(section) is not None
