"""Keys that the config leaves out although somebody has stated them in code: they mean "auto".

Trainer states all of its arguments, and a script what it gives to accelerate's DummyOptim and DummyScheduler beyond
their defaults. An absent section stays absent: without an optimizer section the optimizer is the script's. Only a
precision that TrainingArguments ask for makes its section, as accelerate would.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_zero.config.batch import MICRO, STEPS, TRAIN
from hf_zero.config.choices.optimizer import is_adam, optimizer_takes
from hf_zero.config.choices.scheduler import schedule_takes
from hf_zero.config.offers import Offer
from hf_zero.config.sources import is_auto
from hf_zero.config.views import AcceleratorView, TrainingView, Views

Path = tuple[str, ...]
_STEP_COUNTS = ("total_num_steps", "warmup_num_steps")
_STAND_IN_DEFAULTS = {"lr": 0.001, "weight_decay": 0}  # of DummyOptim


def left_out(config: Mapping[str, Any], views: Views, known: Mapping[str, Offer]) -> Iterator[tuple[Path, Offer]]:
    """What is stated about absent keys, by path; an offer of "auto" is answered when training starts."""
    if views.training is not None:
        yield from _by_trainer(config, views.training, known)
    elif views.accelerator is not None:
        yield from _by_script(config, views.accelerator, known)


def _by_trainer(
    config: Mapping[str, Any], view: TrainingView, known: Mapping[str, Offer]
) -> Iterator[tuple[Path, Offer]]:
    for path in _top_level(config, view):
        if path in known:
            yield (path,), known[path]
    yield from _precision(config, view, known)
    optimizer, scheduler = _section(config, "optimizer"), _section(config, "scheduler")
    for name in ("lr", "betas", "eps", "weight_decay"):
        offered = known.get(f"optimizer.params.{name}")
        if offered is not None and _lacks_argument(optimizer, name) and _states(view, name, optimizer):
            yield ("optimizer", "params", name), offered
    for name in ("warmup_max_lr", *_STEP_COUNTS):
        # No warm-up is what TrainingArguments say by default; a schedule that warms up then keeps its own number.
        if _lacks_step(scheduler, name) and not (name == "warmup_num_steps" and view.is_default("warmup_steps")):
            later = Offer("auto", view.source("max_steps"), name)
            offered = known.get(f"scheduler.params.{name}", later if name in _STEP_COUNTS else None)
            if offered is not None:
                yield ("scheduler", "params", name), offered


def _by_script(
    config: Mapping[str, Any], view: AcceleratorView, known: Mapping[str, Offer]
) -> Iterator[tuple[Path, Offer]]:
    optimizer, scheduler = _section(config, "optimizer"), _section(config, "scheduler")
    for name, value in view.optimizer.items():
        if value != _STAND_IN_DEFAULTS.get(name) and _lacks_argument(optimizer, name):
            yield ("optimizer", "params", name), known[f"optimizer.params.{name}"]
    for name, value in view.schedule.items():
        if not (name == "warmup_num_steps" and value == 1) and _lacks_step(scheduler, name):
            yield ("scheduler", "params", name), known[f"scheduler.params.{name}"]


def _top_level(config: Mapping[str, Any], view: TrainingView) -> Iterator[str]:
    """`train_batch_size` is never made up: it follows from the other two."""
    if view.steps_only:
        return
    wanted = ["gradient_clipping", STEPS]
    total = config.get(TRAIN)
    if not view.batch_size_may_vary or total is None or is_auto(total):
        wanted.append(MICRO)
    yield from (key for key in wanted if config.get(key) is None)


def _precision(
    config: Mapping[str, Any], view: TrainingView, known: Mapping[str, Offer]
) -> Iterator[tuple[Path, Offer]]:
    for name, wanted in (("fp16", view.fp16), ("bf16", view.bf16)):
        offer = known.get(f"{name}.enabled")
        written = "bfloat16" if name == "bf16" and "bf16" not in config and "bfloat16" in config else name
        section = config.get(written)
        if offer is None or view.steps_only or not wanted or (section is not None and not isinstance(section, Mapping)):
            continue
        if section is None and name == "fp16":
            yield ("fp16", "auto_cast"), Offer(True, offer.source, offer.name)
        if section is None or section.get("enabled") is None:
            yield (written, "enabled"), offer


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A section with a type and readable params, or None; what is wrong with it is said elsewhere."""
    section = config.get(name)
    if not isinstance(section, Mapping) or not isinstance(section.get("type"), str):
        return None
    return section if isinstance(section.get("params") or {}, Mapping) else None


def _lacks_argument(section: Mapping[str, Any] | None, name: str) -> bool:
    if section is None:
        return False
    params = section.get("params") or {}
    return params.get(name) is None and optimizer_takes(section["type"], params, name)


def _lacks_step(section: Mapping[str, Any] | None, name: str) -> bool:
    if section is None or (section.get("params") or {}).get(name) is not None:
        return False
    return schedule_takes(section["type"], name)


def _states(view: TrainingView, name: str, optimizer: Mapping[str, Any] | None) -> bool:
    """adam_beta1, adam_beta2 and adam_epsilon speak of Adam: for other optimizers their defaults are no statement."""
    stated = {
        "betas": not (view.is_default("adam_beta1") and view.is_default("adam_beta2")),
        "eps": not view.is_default("adam_epsilon"),
    }
    return stated.get(name, True) or (optimizer is not None and is_adam(optimizer["type"]))
