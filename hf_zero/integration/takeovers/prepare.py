"""Around Accelerator.prepare's work on ds.json: autos filled and problems named before it, every engine kept after."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from hf_zero.api.model_view import model_view
from hf_zero.config import ConfigError, Problem, Views, examine
from hf_zero.config.canonical import normalise
from hf_zero.config.fill import apply, drop_strays, fill, strays
from hf_zero.integration.engine_choice import joined
from hf_zero.integration.host_words import no_engine, raise_both
from hf_zero.integration.objects import object_problems
from hf_zero.integration.takeovers import MARK, stepped_aside
from hf_zero.integration.views import accelerator_view, is_dummy


def around(original: Callable[..., Any]) -> Callable[..., Any]:
    def _prepare_deepspeed(self: Any, *args: Any) -> Any:
        model = next((thing for thing in args if isinstance(thing, nn.Module)), None)
        if model is None:
            _refuse_lone_stand_in(args)
            return tuple(_alone(self, thing) for thing in original(self, *args))
        try:
            fill_autos(self, model, args)
        except ConfigError as error:
            _refuse(self, error, lambda: original(self, *args))
        # accelerate keeps the first engine only, and warns: here a second model's loss finds its engine.
        earlier, self.deepspeed_engine_wrapped = self.deepspeed_engine_wrapped, None
        try:
            result = original(self, *args)
        except BaseException:
            self.deepspeed_engine_wrapped = earlier
            raise
        self.deepspeed_engine_wrapped = joined(
            earlier, self.deepspeed_engine_wrapped, updates_at_step=_has_working_step(result)
        )
        return result

    return _prepare_deepspeed


def _has_working_step(prepared: Sequence[Any]) -> bool:
    """Whether the script gets an optimizer object, and its `step` is ours."""
    from accelerate.utils import DeepSpeedOptimizerWrapper

    methods = (DeepSpeedOptimizerWrapper.step, DeepSpeedOptimizerWrapper.zero_grad)
    has_object = any(isinstance(thing, DeepSpeedOptimizerWrapper) for thing in prepared)
    return has_object and all(hasattr(method, MARK) for method in methods)


def _refuse(accelerator: Any, found: ConfigError, check: Callable[[], object]) -> NoReturn:
    """Raise what was found, beginning with accelerate's own words; its check changes the config, which is put back."""
    config = accelerator.deepspeed_plugin.deepspeed_config
    kept = copy.deepcopy(dict(config))
    # A size that nobody knows is no mistake here: the default holds.
    for path in strays(config):
        if path[0] == "zero_optimization" and len(path) == 2:
            del config["zero_optimization"][path[1]]
    try:
        with no_engine():
            raise_both(found.problems, check)
    finally:
        config.clear()
        config.update(kept)


def _refuse_lone_stand_in(things: Sequence[Any]) -> None:
    if any(is_dummy(thing, "DummyScheduler") for thing in things):
        raise ValueError(
            "prepare() got a DummyScheduler without its model: the engine makes the real one, so give both in one call"
        )


def _alone(accelerator: Any, prepared: Any) -> Any:
    """A schedule in a call without its model: upstream leaves it as it is, so that it moves with every micro-batch."""
    return accelerator.prepare_scheduler(prepared) if is_schedule(prepared) else prepared


def fill_autos(accelerator: Any, model: nn.Module, objects: Sequence[Any] = ()) -> None:
    """Fill the accelerator's ds.json from the objects given to `prepare`; raise ConfigError for what is wrong."""
    optimizer = next((x for x in objects if isinstance(x, Optimizer) or is_dummy(x, "DummyOptim")), None)
    scheduler = next((x for x in objects if is_schedule(x)), None)
    try:
        config = accelerator.deepspeed_plugin.deepspeed_config
        views = Views(
            world_size=accelerator.num_processes,
            accelerator=accelerator_view(accelerator, objects, optimizer, scheduler),
            model=model_view(model),
        )
    except AttributeError as error:  # an Accelerator of a shape that we do not know: it fills its own autos
        stepped_aside("Accelerator._prepare_deepspeed", error)
        return
    problems: list[Problem] = [*object_problems(config, optimizer, scheduler)]
    problems += examine(config, views).problems
    if problems:
        raise ConfigError(problems)
    apply(config, fill(config, views))
    drop_strays(config)
    normalise(config)


def is_schedule(thing: Any) -> bool:
    """Whether `prepare` treats this as a learning rate schedule."""
    from torch.optim.lr_scheduler import LRScheduler

    from hf_zero.schedules import VALID_LR_SCHEDULES

    return (
        isinstance(thing, LRScheduler)
        or is_dummy(thing, "DummyScheduler")
        or type(thing).__name__ in VALID_LR_SCHEDULES
    )
