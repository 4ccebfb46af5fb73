"""Replaces every "auto" whose value is known, and compares fixed values with the values they must match.

`offers` lists the value for each key and its source. `left_out` finds keys that are absent from the config but stated
in code; they mean "auto". Trainer states all of its arguments, and a script states the non-default arguments of
accelerate's DummyOptim and DummyScheduler. An absent section stays absent: without an optimizer section, the script
provides the optimizer. Only a precision requested by TrainingArguments creates its section, as in accelerate.
"""

from __future__ import annotations

import functools
import numbers
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_zero.config.batch import MICRO, STEPS, TRAIN
from hf_zero.config.checks import SEQUENCE
from hf_zero.config.choices.sections import is_adam, optimizer_takes, schedule_takes
from hf_zero.config.errors import Edit, Other, Problem
from hf_zero.config.schema.fields import as_whole
from hf_zero.config.sources import (
    AcceleratorView,
    ConfigDict,
    Given,
    ModelView,
    Source,
    TrainingView,
    Views,
    dotted,
    is_auto,
    is_open,
    leaves,
    source_in,
)
from hf_zero.config.validate import ZERO_SPELLINGS

SIZED_BY_MODEL = {
    "zero_optimization.reduce_bucket_size": lambda hidden: hidden * hidden,
    "zero_optimization.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "zero_optimization.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}

# Names of the hidden size in model configurations.
_NAMES = ("d_model", "n_embd", "model_dim", "embed_dim", "embedding_size", "dim", "hidden_dim")
# Sub-configurations with most of the parameters, tried first; the others follow in their own order.
_PARTS = ("text_config", "language_config", "llm_config", "decoder", "encoder", "vision_config", "audio_config")
_DEEPEST = 4
_OTHER_SPELLINGS = {
    "bfloat16.enabled": "bf16.enabled",
    **{f"zero_optimization.{written}": f"zero_optimization.{name}" for written, name in ZERO_SPELLINGS.items()},
}


@dataclass(frozen=True, slots=True)
class Offer:
    """A value for a key. With `must_match`, a different fixed value in the config is an error."""

    value: object
    source: Source
    name: str
    must_match: bool = False
    also: object = None  # another value that agrees with this one


def offers(config: Mapping[str, Any], views: Views) -> dict[str, Offer]:
    """Return offers by key path. Trainer takes precedence over Accelerate, and both over other sources."""
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
        for path, given in views.accelerator.launched.items():
            yield path, Offer(given.value, given.source, given.source.text)
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


def _from_prepare(config: Mapping[str, Any], view: AcceleratorView, data_ranks: int) -> Iterator[tuple[str, Offer]]:
    steps = view.accumulation_steps
    if steps is not None:
        yield STEPS, _stated(steps, "Accelerator(gradient_accumulation_steps)")
    if view.batch_sizes:
        micro = max(view.batch_sizes) if view.take_largest_batch else min(view.batch_sizes)
        yield MICRO, _stated(micro, "batch_size of the dataloader given to prepare()")
        written = None if isinstance(config, ConfigDict) and config.assumes(STEPS) else _fixed(config.get(STEPS))
        micro, steps = _fixed(config.get(MICRO)) or micro, written or steps
        yield TRAIN, _stated(micro * (steps or 1) * data_ranks, "micro batch x accumulation steps x processes")
    if view.prepares:
        gather = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
        for path, default in (("gradient_clipping", 1.0), (gather, False)):
            yield path, Offer(default, Source("accelerator", "Accelerate's default"), "default")
    for name, value in view.optimizer.items():
        yield f"optimizer.params.{name}", _stated(value, f"DummyOptim({name})")
    for name, value in view.schedule.items():
        yield f"scheduler.params.{name}", _stated(value, f"DummyScheduler({name})")
    if view.schedule:
        yield "scheduler.params.warmup_min_lr", Offer(0, Source("accelerator", "Accelerate's default"), "default")
    if view.max_lr is not None:
        yield "scheduler.params.warmup_max_lr", _stated(view.max_lr, "the learning rate of the optimizer")


def _stated(value: object, text: str) -> Offer:
    return Offer(value, Source("script", text), text)


def _fixed(value: object) -> int | None:
    try:
        return None if value is None or is_auto(value) else as_whole(value)
    except ValueError:
        return None  # reported as a separate problem


def _from_config(config: Mapping[str, Any]) -> Iterator[tuple[str, Offer]]:
    """Yield values that one section of the config determines for another."""
    rate = dict(leaves(config)).get(("optimizer", "params", "lr"))
    if isinstance(rate, (int, float)) and not isinstance(rate, bool):
        yield "scheduler.params.warmup_max_lr", Offer(rate, Source("derived", "optimizer.params.lr"), "lr")


def hidden_size(model: ModelView | None) -> Given | None:
    """Return the hidden size, which determines bucket sizes, or None if it is not known."""
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
            # transformers tries this name next.
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
    """Return the most frequent matrix extent: each layer reads from or writes to the hidden state."""
    extents = Counter(extent for shape in shapes if len(shape) >= 2 for extent in {*shape[:2]} if extent > 1)
    if not extents:
        return None
    size = max(extents, key=lambda extent: (extents[extent], extent))
    return Given(value=size, source=Source("model", f"the shapes of its parameters ({extents[size]} have {size})"))


Path = tuple[str, ...]
_STEP_COUNTS = ("total_num_steps", "warmup_num_steps")
_STAND_IN_DEFAULTS = {"lr": 0.001, "weight_decay": 0}  # the defaults of DummyOptim


def left_out(config: Mapping[str, Any], views: Views, known: Mapping[str, Offer]) -> Iterator[tuple[Path, Offer]]:
    """Yield values stated in code for absent keys. An offer of "auto" is filled when training starts."""
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
        # TrainingArguments have no warm-up by default; a schedule with warm-up then keeps its own number.
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
    """Yield absent batch sizes. `train_batch_size` is never added, because it follows from the other two."""
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
    """Return a section with a type and valid params, or None; its errors are reported elsewhere."""
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
    """Whether the argument is stated. The defaults of adam_beta1 and the like only apply to Adam."""
    stated = {
        "betas": not (view.is_default("adam_beta1") and view.is_default("adam_beta2")),
        "eps": not view.is_default("adam_epsilon"),
    }
    return stated.get(name, True) or (optimizer is not None and is_adam(optimizer["type"]))


# Arguments that TrainingArguments has for Adam, and that not every optimizer accepts.
_OF_ADAM = ("optimizer.params.betas", "optimizer.params.eps")


@dataclass(slots=True)
class Changes:
    """The changes that fill a config. The config itself is not modified."""

    values: dict[tuple[str, ...], object] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def fill(config: Mapping[str, Any], views: Views) -> Changes:
    """Return the known values for autos and for keys stated in code, and a problem per contradiction."""
    known, changes = offers(config, views), Changes()
    for path, value in leaves(config):
        name = dotted(path)
        offer = known.get(name)
        if offer is None or _is_foreign(config, name):
            continue
        if is_open(config, name, value, offer.source):
            changes.values[path] = offer.value
            changes.sources[name] = offer.source
        elif offer.must_match and value is not None and not (same(value, offer.value) or same(value, offer.also)):
            changes.problems.append(conflict(config, path, value, offer))
    for path, offer in left_out(config, views, known):
        changes.values[path] = offer.value
        if not is_auto(offer.value):
            changes.sources[dotted(path)] = offer.source
    if views.training is not None and views.training.save_on_each_node:
        _one_writer_per_node(config, changes, views.training)
    return changes


def _one_writer_per_node(config: Mapping[str, Any], changes: Changes, training: TrainingView) -> None:
    """Set the only key that Trainer sets even if the config does not have it."""
    if isinstance(config.get("checkpoint", {}), Mapping):
        path = ("checkpoint", "use_node_local_storage")
        changes.values[path] = True
        changes.sources[dotted(path)] = training.source("save_on_each_node")


def apply(config: dict[str, Any], changes: Changes) -> None:
    """Write the values to the config in place, and record their sources."""
    for path, value in changes.values.items():
        _set(config, path, value, lambda section: section or {})  # a null section counts as absent
    if isinstance(config, ConfigDict):
        config.filled.update(changes.sources)


def drop_unfilled(config: dict[str, Any], keep: str = "") -> None:
    """Remove every unfilled "auto" in place; an absent key means the default.

    Args:
        keep: do not change anything below this path.
    """
    for path in unfilled_autos(config):
        if keep and dotted(path).startswith(f"{keep}."):
            continue
        holder = config
        for key in path[:-1]:
            holder = holder[key]
        del holder[path[-1]]


def filled(config: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Return a copy of the config with the values. Sections without changes are shared."""
    result: dict[str, Any] = dict(config)
    for path, value in changes.values.items():
        _set(result, path, value, lambda section: dict(section or {}))
    return result


def _set(holder: dict[str, Any], path: tuple[str, ...], value: object, opened: Callable[[Any], dict[str, Any]]) -> None:
    """Write a nested value, replacing each section on the way with the result of `opened`."""
    for key in path[:-1]:
        holder[key] = opened(holder.get(key))
        holder = holder[key]
    holder[path[-1]] = value


def unfilled_autos(config: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the paths whose value is still "auto"."""
    return [path for path, value in leaves(config) if is_auto(value)]


def same(left: object, right: object) -> bool:
    """Whether two settings are equal: 8, 8.0 and "8" are, true and 1 are not."""
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    left, right = _plain(left), _plain(right)
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    return left == right


def _plain(value: object) -> object:
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        return int(value) if value.strip().isdecimal() and len(value) < 300 else float(value)
    except ValueError:
        return value


def conflict(config: Mapping[str, Any], keys: tuple[str, ...], value: object, offer: Offer) -> Problem:
    """Return the problem of a fixed value that differs from the one stated elsewhere.

    Only an explicit flag can replace the written value; a default of TrainingArguments cannot.
    """
    shown = offer.value if isinstance(offer.value, (numbers.Number, list)) else str(offer.value)
    path, rule = dotted(keys), "the config and TrainingArguments must have the same value"
    fix = 'write "auto" in the config so that it follows, or make the two equal'
    origin, other = str(source_in(config, path)), Other(offer.name, shown, str(offer.source))
    edit = Edit(keys, value="auto") if offer.source.kind == "flag" else None
    return Problem(path, value, rule, fix, origin=origin, other=other, edit=edit)


def _is_foreign(config: Mapping[str, Any], path: str) -> bool:
    """Whether the optimizer or schedule in the config does not accept the offered argument."""
    section = config.get("optimizer") if path in _OF_ADAM else None
    kind = section.get("type") if isinstance(section, Mapping) else None
    if not isinstance(kind, str) or not isinstance(section, Mapping):
        return False
    params = section.get("params")
    return not optimizer_takes(kind, params if isinstance(params, Mapping) else {}, path.rpartition(".")[2])
