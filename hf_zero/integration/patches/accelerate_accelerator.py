"""accelerate.accelerator: Accelerator.prepare on ds.json, several models, no_sync, the gradient norm, and distributing
and gathering samples that several ranks share."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from hf_zero.api.engine import ZeroEngine
from hf_zero.config import ConfigError
from hf_zero.config.hosts import unfilled_autos
from hf_zero.integration.huggingface.engine_choice import (
    engines_of,
    give_up,
    join,
    no_engine,
    prepared_by,
    raise_both,
)
from hf_zero.integration.huggingface.prepare import (
    counting_each_rank,
    fill_autos,
    is_schedule,
    keep_adalora_gradients,
    leaving_cuts_to_the_engine,
    mark_cut,
    parameters_of,
    prepare_each,
    show_filled,
    show_sequence_mesh,
)
from hf_zero.integration.huggingface.samples import (
    DataRanks,
    deal_to_groups,
    gather_samples,
    note_groups,
    ranks_per_sample,
    with_samples,
)
from hf_zero.integration.huggingface.views import is_dummy
from hf_zero.integration.patches import MARK, Function, Patches
from hf_zero.log import logger

PATCHES = Patches("accelerate.accelerator")
_REFUSAL = "_refuse_recurrent_layers_under_sequence_parallelism"
_told: set[tuple[float, float]] = set()
_EVERY_SAMPLE = "under tensor parallelism every sample is gathered from each rank that sees it"
_ONCE = "accelerate gathers from one rank of those that it deals the same batches to"


@PATCHES.add(
    "Accelerator.prepare(self, args, device_placement)",
    without="prepare() takes one model only",
    until="accelerate prepares several models under one DeepSpeed config, each with its optimizer and schedule",
)
def around_prepare(original: Function, self: Any, *args: Any, device_placement: Any = None) -> Any:
    """Prepare several models in one call, each with or without optimizer and schedule. Prepared objects stay unchanged,
    as without an engine, so that running a notebook cell again does not wrap the engine in a second one."""
    if self.distributed_type != "DEEPSPEED" or device_placement is not None:
        return original(self, *args, device_placement=device_placement)
    wanted = {id(parameter) for thing in args if _is_new_optimizer(thing) for parameter in parameters_of(thing)}
    stays = [_is_prepared(thing, wanted) for thing in args]
    unprepared = (thing for thing, is_kept in zip(args, stays, strict=True) if not is_kept)
    new = [thing.module if isinstance(thing, ZeroEngine) else thing for thing in unprepared]

    def prepare_some(things: Sequence[Any]) -> tuple[Any, ...]:
        result = original(self, *things)
        return result if len(things) > 1 else (result,)

    several = sum(isinstance(thing, nn.Module) for thing in new) > 1
    with _forgotten_if_refused(self), leaving_cuts_to_the_engine(self):
        prepared = iter((prepare_each(self, new, prepare_some) if several else prepare_some(new)) if new else ())
    result = tuple(thing if is_kept else next(prepared) for thing, is_kept in zip(args, stays, strict=True))
    return result if len(result) > 1 else result[0]


@contextmanager
def _forgotten_if_refused(accelerator: Any) -> Iterator[None]:
    """Context after whose error accelerate does not know the objects of the call: a later one would take its batch size
    from their loaders, and `save_state` would save them."""
    lists = (accelerator._dataloaders, accelerator._models, accelerator._optimizers, accelerator._schedulers)
    before = [list(known) for known in lists]
    try:
        yield
    except BaseException:
        for known, earlier in zip(lists, before, strict=True):
            known[:] = earlier
        raise


def _is_prepared(thing: Any, wanted: Collection[int]) -> bool:
    """Whether `thing` is the optimizer of an engine, or a live engine, unless a new optimizer will train its parameters
    (`wanted`, by id)."""
    if isinstance(thing, ZeroEngine):
        return not thing.is_destroyed and not any(id(parameter) in wanted for parameter in thing.module.parameters())
    return isinstance(thing, Optimizer) and prepared_by(getattr(thing, "optimizer", None)) is not None


def _is_new_optimizer(thing: Any) -> bool:
    is_optimizer = isinstance(thing, Optimizer) or is_dummy(thing, "DummyOptim")
    return is_optimizer and prepared_by(getattr(thing, "optimizer", None)) is None


@PATCHES.add(
    "Accelerator._prepare_deepspeed(self, args)",
    without="ds.json is not checked by prepare(), which takes one model only",
    until="accelerate reports contradictions with their places, and keeps an engine for every model",
)
def around_prepare_deepspeed(original: Function, self: Any, *args: Any) -> Any:
    """Fill autos and report problems before accelerate's own work, and keep every engine after it."""
    model = next((thing for thing in args if isinstance(thing, nn.Module)), None)
    if model is None:
        if any(is_dummy(thing, "DummyScheduler") for thing in args):
            raise ValueError(
                "prepare() got a DummyScheduler without its model: the engine makes the real one, so give both in one "
                "call"
            )
        # Upstream leaves a schedule without its model as it is, so that it advances with every micro-batch.
        results = original(self, *args)
        return tuple(self.prepare_scheduler(thing) if is_schedule(thing) else thing for thing in results)
    args = _schedules_made(args)
    try:
        fill_autos(self, model, args)
    except ConfigError as error:
        _refuse(self, error, lambda: original(self, *args))
    mark_cut(self, model)
    if any(_is_new_optimizer(thing) for thing in args):
        _give_up_engines_of(self, model)
    # accelerate only keeps the first engine, and warns; here a second model's loss finds its engine.
    earlier, self.deepspeed_engine_wrapped = self.deepspeed_engine_wrapped, None
    try:
        with counting_each_rank(self):
            result = original(self, *args)
    except BaseException:
        self.deepspeed_engine_wrapped = earlier
        raise
    show_filled(self.deepspeed_plugin)
    show_sequence_mesh(self, result)
    keep_adalora_gradients(result)
    join(earlier, self.deepspeed_engine_wrapped, updates_at_step=_has_working_step(result))
    return result


def _give_up_engines_of(accelerator: Any, model: nn.Module) -> None:
    """Remove the first engine of a model that is prepared with another optimizer (for a second training phase), because
    the loss would still find it."""
    engines = engines_of(accelerator.deepspeed_engine_wrapped)
    if engines is None:
        return
    inner = set(model.modules())
    for engine in [prepared.engine for prepared in engines.trained if prepared.engine.module in inner]:
        if not give_up(accelerator.deepspeed_engine_wrapped, engine):
            accelerator.deepspeed_engine_wrapped = None
        accelerator._models = [each for each in accelerator._models if each is not engine]
        accelerator._optimizers = [each for each in accelerator._optimizers if each.optimizer is not engine.optimizer]
        engine.destroy()


@PATCHES.add(
    "Accelerator.free_memory(self, objects)",
    without="free_memory() destroys one engine only",
    until="accelerate keeps an engine for every model",
)
def around_free_memory(original: Function, self: Any, *objects: Any) -> Any:
    """Destroy all engines; upstream knows one."""
    wrapper: Any = getattr(self, "deepspeed_engine_wrapped", None)
    engines = engines_of(wrapper)
    for engine in () if engines is None else engines.engines:
        if engine is not wrapper.engine:
            engine.destroy()
    return original(self, *objects)


def _has_working_step(prepared: Sequence[Any]) -> bool:
    """Whether the script gets an optimizer object with hf_zero's `step`."""
    from accelerate.utils import DeepSpeedOptimizerWrapper

    methods = (DeepSpeedOptimizerWrapper.step, DeepSpeedOptimizerWrapper.zero_grad)
    has_object = any(isinstance(thing, DeepSpeedOptimizerWrapper) for thing in prepared)
    return has_object and all(hasattr(method, MARK) for method in methods)


def _refuse(accelerator: Any, error: ConfigError, check: Callable[[], object]) -> NoReturn:
    """Raise the problems, preceded by accelerate's own message; its check changes the config, which is restored."""
    config = accelerator.deepspeed_plugin.deepspeed_config
    kept = copy.deepcopy(dict(config))
    # An unknown size is not an error here: the default applies.
    for path in unfilled_autos(config):
        if path[0] == "zero_optimization" and len(path) == 2:
            del config["zero_optimization"][path[1]]
    try:
        with no_engine():
            raise_both(error.problems, check)
    finally:
        config.clear()
        config.update(kept)


def _schedules_made(things: Sequence[Any]) -> tuple[Any, ...]:
    """A DummyScheduler with a function beside an optimizer of the script: upstream calls the function for an optimizer
    of the config alone, and here would step the placeholder."""
    optimizer = next((thing for thing in things if isinstance(thing, Optimizer)), None)
    if optimizer is None:
        return tuple(things)
    makers = (getattr(x, "lr_scheduler_callable", None) if is_dummy(x, "DummyScheduler") else None for x in things)
    return tuple(thing if make is None else make(optimizer) for thing, make in zip(things, makers, strict=True))


@PATCHES.add(
    "map_pytorch_optim_to_deepspeed(optimizer)",
    without="under offload, accelerate exchanges the script's optimizer for another",
    until="zero_force_ds_cpu_optimizer is false by default; as a key in ds.json it would show in the user's config",
)
def around_exchange(original: Function, optimizer: Any) -> Any:
    """With offload, accelerate replaces Adam and Adagrad by DeepSpeed's; keep the script's optimizer."""
    return optimizer


@PATCHES.add(
    "Accelerator.no_sync(self, model)",
    without="backward() inside no_sync() may make an update",
    until="accelerate hands sync_gradients = False to DeepSpeed inside no_sync()",
)
@contextmanager
def around_no_sync(original: Function, self: Any, model: Any) -> Iterator[None]:
    """A backward inside no_sync makes no update at any stage; upstream's would step."""
    with original(self, model):
        if self.distributed_type != "DEEPSPEED":
            yield
            return
        before = self.gradient_state.sync_gradients
        self.gradient_state._set_sync_gradients(False)
        try:
            yield
        finally:
            self.gradient_state._set_sync_gradients(before)


@PATCHES.add(
    "Accelerator.clip_grad_norm_(self, parameters, max_norm, norm_type)",
    without="a clip_grad_norm_ with another limit than ds.json's is not reported",
    until="accelerate asks the engine of these parameters, and compares max_norm with its gradient_clipping",
)
def around_clip_grad_norm(original: Function, self: Any, parameters: Any, max_norm: Any, norm_type: Any = 2) -> Any:
    """Return the norm of the given model, and warn about a limit that differs from the engine's."""
    engines = engines_of(getattr(self, "deepspeed_engine_wrapped", None))
    if engines is None:
        return original(self, parameters, max_norm, norm_type)
    _tell_of_limit([prepared.engine for prepared in engines.trained], float(max_norm))
    # A single tensor is accepted, as in torch.
    return engines.norm_of([parameters] if hasattr(parameters, "grad_fn") else parameters)


def _tell_of_limit(engines: Sequence[Any], max_norm: float) -> None:
    """Warn about a limit that differs from the engine's; infinity only requests the norm."""
    limits = {float(engine.gradient_clipping()) for engine in engines if engine.optimizer is not None}
    for limit in limits:
        if math.isfinite(max_norm) and limit != max_norm and (limit, max_norm) not in _told:
            _told.add((limit, max_norm))
            logger.warning(
                "clip_grad_norm_(max_norm=%g): the engine clips at gradient_clipping = %g (0: not at all), whatever is "
                "asked for here, as with DeepSpeed; write gradient_clipping: %g in the config, or "
                "DeepSpeedPlugin(gradient_clipping=%g)",
                max_norm,
                limit,
                max_norm,
                max_norm,
            )


@PATCHES.add("Accelerator.gather(self, tensor)", without=_EVERY_SAMPLE, until=_ONCE)
def around_gather(original: Function, self: Any, tensor: Any) -> Any:
    """Gather each sample once, because the ranks of a tensor group see the same samples. Numbers are gathered from all
    ranks, like `num_processes`."""
    size = ranks_per_sample()
    if size == 1:
        return original(self, tensor)
    return gather_samples(lambda one: original(self, one), tensor, size)


@PATCHES.add("Accelerator.gather_for_metrics(self, input_data, use_gather_object)", without=_EVERY_SAMPLE, until=_ONCE)
def around_gather_for_metrics(original: Function, self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """Gather for metrics by samples, including numbers."""
    if ranks_per_sample() > 1 and not use_gather_object:
        input_data = with_samples(input_data)
    return original(self, input_data, use_gather_object)


@PATCHES.add("gather_object(object)", without=_EVERY_SAMPLE, until=_ONCE)
def around_gather_object(original: Function, object: Any) -> Any:
    """Patch the name in this module for `gather_for_metrics`; `accelerate.utils.gather_object` uses all ranks."""
    size = ranks_per_sample()
    if size == 1:
        return original(object)
    of_ranks = original([object])  # upstream joins the lists of all ranks
    return [item for of_rank in of_ranks[::size] for item in of_rank]


@PATCHES.add(
    "Accelerator.prepare_data_loader(self, data_loader, device_placement, slice_fn_for_dispatch)",
    without="under tensor parallelism, batches that rank 0 deals out (iterable datasets) are the same for all ranks, "
    "and a loader that is prepared before the model gives ranks of one tensor group different ones",
    until="DataLoaderDispatcher deals to groups of ranks, and the device mesh is there before the first prepare()",
)
def around_prepare_data_loader(original: Function, self: Any, *args: Any, **options: Any) -> Any:
    """Distribute batches to tensor groups, however and whenever the loader is prepared."""
    note_groups(self)
    return deal_to_groups(original(self, *args, **options))


@PATCHES.add(
    "Accelerator.split_between_processes(self, inputs, apply_padding)",
    without="under tensor parallelism, split_between_processes gives ranks that need the same inputs different ones",
    until="split_between_processes splits between groups of ranks",
)
def around_split(original: Function, self: Any, inputs: Any, apply_padding: bool = False) -> Any:
    """Give the ranks of a tensor group the same inputs."""
    size = ranks_per_sample()
    if size == 1:
        return original(self, inputs, apply_padding)
    from accelerate.state import PartialState

    return PartialState.split_between_processes(DataRanks(PartialState(), size), inputs, apply_padding=apply_padding)


@PATCHES.add(
    "Accelerator.get_state_dict(self, model, unwrap)",
    without="below stage 3, Trainer and get_state_dict do not save models whole whose experts are spread over ranks",
    until="get_state_dict asks an engine for its weights at every stage",
)
def around_get_state_dict(original: Function, self: Any, model: Any, unwrap: bool = True) -> Any:
    """Return whole weights on the first rank for an engine whose ranks hold parts. Upstream only asks the engine if the
    config has stage 3 or autotp_size."""
    if isinstance(model, ZeroEngine) and model.groups.holds_parts and model.zero_optimization_stage() < 3:
        return model.module_view.consolidated()
    return original(self, model, unwrap)


def around_refusal(original: Function, model: Any) -> None:
    """Do nothing, where accelerate refuses models with linear attention if ranks share sequences: hf_zero lets these
    layers see whole sequences, and refuses models that it cannot share itself."""


if find_spec("accelerate") and hasattr(import_module("accelerate.big_modeling"), _REFUSAL):  # not in older versions
    PATCHES.add(
        f"{_REFUSAL}(model)",
        without="models with linear attention cannot share sequences under Trainer and Accelerate; initialize() alone "
        "can",
        until="accelerate asks the library that shares sequences whether it can",
    )(around_refusal)
