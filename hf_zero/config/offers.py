"""Which value each key would get from whom: what replaces an "auto", and what a fixed value has to agree with."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_zero.config.batch import MICRO, STEPS, TRAIN
from hf_zero.config.checks import SEQUENCE
from hf_zero.config.schema.fields import as_whole
from hf_zero.config.sources import ConfigDict, Source, is_auto
from hf_zero.config.translate import ZERO_SPELLINGS
from hf_zero.config.views import AcceleratorView, Given, ModelView, TrainingView, Views

SIZED_BY_MODEL = {
    "zero_optimization.reduce_bucket_size": lambda hidden: hidden * hidden,
    "zero_optimization.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "zero_optimization.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}

# Where the configuration of a model keeps its hidden size.
_NAMES = ("d_model", "n_embd", "model_dim", "embed_dim", "embedding_size", "dim", "hidden_dim")
# The part that carries most of the parameters in models made of several; others follow in their own order.
_PARTS = ("text_config", "language_config", "llm_config", "decoder", "encoder", "vision_config", "audio_config")
_DEEPEST = 4
_OTHER_SPELLINGS = {
    "bfloat16.enabled": "bf16.enabled",
    **{f"zero_optimization.{written}": f"zero_optimization.{name}" for written, name in ZERO_SPELLINGS.items()},
}


@dataclass(frozen=True, slots=True)
class Offer:
    """A value for a key. A fixed value in the config that differs is wrong where `must_match` says so."""

    value: object
    source: Source
    name: str
    must_match: bool = False
    also: object = None  # another value that agrees with this one


def offers(config: Mapping[str, Any], views: Views) -> dict[str, Offer]:
    """By path of the key; where several know a value, Trainer goes before Accelerate, and both before the rest."""
    by_path: dict[str, Offer] = {}
    for path, offer in _all(config, views):
        by_path.setdefault(path, offer)
    for written, meant in _OTHER_SPELLINGS.items():
        if meant in by_path:
            by_path.setdefault(written, by_path[meant])
    return by_path


def _all(config: Mapping[str, Any], views: Views) -> Iterator[tuple[str, Offer]]:
    size = views.sequence_size or _fixed(config.get(SEQUENCE)) or 1
    data_ranks = max(1, views.world_size // max(1, size))
    if views.training is not None:
        if not views.training.steps_only:
            yield from _from_training(views.training, data_ranks, size)
        yield from _steps(views.training)
    if views.accelerator is not None:
        yield from _from_launch(views.accelerator)
        yield from _from_prepare(config, views.accelerator, data_ranks)
    hidden = hidden_size(views.model)
    if hidden is not None:
        for path, formula in SIZED_BY_MODEL.items():
            yield path, Offer(formula(hidden.value), hidden.source, "model size")
    yield from _from_config(config)


def _from_training(view: TrainingView, data_ranks: int, sequence_size: int) -> Iterator[tuple[str, Offer]]:
    match = functools.partial(_match, view)
    micro, steps = view.per_device_train_batch_size, view.gradient_accumulation_steps
    fixed = not view.batch_size_may_vary
    yield match(MICRO, micro, "per_device_train_batch_size", must_match=fixed)
    yield match(STEPS, steps, "gradient_accumulation_steps")
    shown = f"world size {data_ranks}" if sequence_size == 1 else f"data ranks {data_ranks}"
    product = f"per_device_train_batch_size {micro} x gradient_accumulation_steps {steps} x {shown}"
    whole = view.source("per_device_train_batch_size", "gradient_accumulation_steps")
    yield TRAIN, Offer(data_ranks * micro * steps, whole, product, fixed)
    yield match("gradient_clipping", view.max_grad_norm or 0.0, "max_grad_norm")
    yield match("optimizer.params.lr", view.learning_rate, "learning_rate")
    yield match("optimizer.params.betas", [view.adam_beta1, view.adam_beta2], "adam_beta1", "adam_beta2")
    yield match("optimizer.params.eps", view.adam_epsilon, "adam_epsilon")
    yield match("optimizer.params.weight_decay", view.weight_decay, "weight_decay")
    yield "scheduler.params.warmup_min_lr", Offer(0, Source("training", "Trainer: warm-up starts at 0"), "warm-up")
    yield match("scheduler.params.warmup_max_lr", view.learning_rate, "learning_rate")
    fp16 = "fp16" if view.fp16 or not view.fp16_full_eval else "fp16_full_eval"
    yield match("fp16.enabled", view.fp16 or view.fp16_full_eval, fp16)
    bf16 = "bf16" if view.bf16 or not view.bf16_full_eval else "bf16_full_eval"
    yield match("bf16.enabled", view.bf16 or view.bf16_full_eval, bf16)


def _steps(view: TrainingView) -> Iterator[tuple[str, Offer]]:
    warmup, by_flag = view.warmup(), "max_steps" in view.origins
    if view.total_steps is not None:
        name = "max_steps" if by_flag else "updates of this run"
        source = view.source("max_steps") if by_flag else Source("training", "Trainer: epochs x batches, or max_steps")
        yield "scheduler.params.total_num_steps", Offer(view.total_steps, source, name, must_match=True)
    if warmup is not None:
        path, offer = _match(view, "scheduler.params.warmup_num_steps", warmup, "warmup_steps")
        yield path, replace(offer, also=0 if view.warmup_steps == 0 else None)


def _match(view: TrainingView, path: str, value: object, *names: str, must_match: bool = True) -> tuple[str, Offer]:
    return path, Offer(value, view.source(*names), " and ".join(names), must_match)


def _from_launch(view: AcceleratorView) -> Iterator[tuple[str, Offer]]:
    for path, given in view.launched.items():
        yield path, Offer(given.value, given.source, given.source.text)


def _from_prepare(config: Mapping[str, Any], view: AcceleratorView, data_ranks: int) -> Iterator[tuple[str, Offer]]:
    steps = view.accumulation_steps
    if steps is not None:
        yield STEPS, _by_script(steps, "Accelerator(gradient_accumulation_steps)")
    if view.batch_sizes:
        micro = max(view.batch_sizes) if view.take_largest_batch else min(view.batch_sizes)
        yield MICRO, _by_script(micro, "batch_size of the dataloader given to prepare()")
        written = None if isinstance(config, ConfigDict) and config.assumes(STEPS) else _fixed(config.get(STEPS))
        micro, steps = _fixed(config.get(MICRO)) or micro, written or steps
        yield TRAIN, _by_script(micro * (steps or 1) * data_ranks, "micro batch x accumulation steps x processes")
    if view.prepares:
        gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        for path, default in (("gradient_clipping", 1.0), (gather, False)):
            yield path, Offer(default, Source("accelerator", "Accelerate's default"), "default")
    for name, value in view.optimizer.items():
        yield f"optimizer.params.{name}", _by_script(value, f"DummyOptim({name})")
    for name, value in view.schedule.items():
        yield f"scheduler.params.{name}", _by_script(value, f"DummyScheduler({name})")
    if view.schedule:
        yield "scheduler.params.warmup_min_lr", Offer(0, Source("accelerator", "Accelerate's default"), "default")
    if view.max_lr is not None:
        yield "scheduler.params.warmup_max_lr", _by_script(view.max_lr, "the learning rate of the optimizer")


def _by_script(value: object, text: str) -> Offer:
    return Offer(value, Source("script", text), text)


def _fixed(value: object) -> int | None:
    try:
        return None if value is None or is_auto(value) else as_whole(value)
    except ValueError:
        return None  # a problem of its own


def _from_config(config: Mapping[str, Any]) -> Iterator[tuple[str, Offer]]:
    """Values that one section of the config gives another."""
    rate = _at(config, "optimizer", "params", "lr")
    if isinstance(rate, (int, float)) and not isinstance(rate, bool):
        yield "scheduler.params.warmup_max_lr", Offer(rate, Source("derived", "optimizer.params.lr"), "lr")


def _at(config: object, *path: str) -> object:
    for key in path:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def hidden_size(model: ModelView | None) -> Given | None:
    """The size that bucket sizes follow from, or None when there is nothing to read it from."""
    if model is None:
        return None
    if model.config is not None:
        given = next(_in_config(model.config, "model.config"), None)
        if given is not None:
            return given
    return _from_shapes(model.shapes)


def _in_config(config: Mapping[str, object], where: str, depth: int = 0) -> Iterator[Given]:
    for name in ("hidden_size", "hidden_sizes", *_NAMES):
        size = _as_size(config.get(name))
        if size is not None:
            yield Given(value=size, source=Source("model", f"{where}.{name} = {size}"))
        if name == "hidden_sizes":
            # What transformers looks at next, before any other name.
            yield from _part(config, "text_config", where, depth)
    for name in (*_PARTS, *(key for key in config if isinstance(key, str) and key not in _PARTS)):
        yield from _part(config, name, where, depth)


def _part(config: Mapping[str, object], name: str, where: str, depth: int) -> Iterator[Given]:
    inner = config.get(name)
    if isinstance(inner, Mapping) and depth < _DEEPEST:
        yield from _in_config(inner, f"{where}.{name}", depth + 1)


def _as_size(value: object) -> int | None:
    if isinstance(value, (list, tuple)):
        sizes = [size for size in map(_as_size, value) if size is not None]
        return max(sizes, default=None)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return None


def _from_shapes(shapes: Iterable[tuple[int, ...]]) -> Given | None:
    """The extent that most matrices share: each layer reads from or writes to the hidden state."""
    extents = Counter(extent for shape in shapes if len(shape) >= 2 for extent in {*shape[:2]} if extent > 1)
    if not extents:
        return None
    size = max(extents, key=lambda extent: (extents[extent], extent))
    return Given(value=size, source=Source("model", f"the shapes of its parameters ({extents[size]} have {size})"))
