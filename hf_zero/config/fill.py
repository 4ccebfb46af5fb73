"""Stage 3: replaces every "auto" whose value is known, and compares fixed values with the values they must match.

`offers` lists the value for each key and its source. A key that is absent from the config but stated in code means
"auto": Trainer states all of its arguments, and a script states the non-default arguments of accelerate's DummyOptim
and DummyScheduler. An absent section stays absent: without an optimizer section, the script provides the optimizer.
Only a precision requested by TrainingArguments creates its section, as in accelerate.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_zero.config.draft import Draft, Path, value_in, with_value
from hf_zero.config.errors import ABSENT, Edit, Finding, Other, Problem, Remark, key_path
from hf_zero.config.schema.batch import MICRO, SEQUENCE, STEPS, TRAIN
from hf_zero.config.schema.fields import as_whole
from hf_zero.config.schema.optimizer import is_adam, optimizer_accepts, schedule_accepts
from hf_zero.config.sources import Source, auto_is_a_value, dotted, is_auto
from hf_zero.config.views import AcceleratorView, Given, ModelView, TrainingView, Views

SIZED_BY_MODEL = {
    "zero_optimization.reduce_bucket_size": lambda hidden: hidden * hidden,
    "zero_optimization.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "zero_optimization.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
# Sources that may replace a value that they filled in earlier: Trainer, when its arguments or the number of steps have
# changed, and the model. Values from a launcher or a script are final.
_MAY_RETURN = ({"training", "flag"}, {"model"})
_STAND_IN_DEFAULTS = {"lr": 0.001, "weight_decay": 0}  # the defaults of DummyOptim


@dataclass(frozen=True, slots=True)
class Offer:
    """A value for a key.

    Attributes:
        must_match: a different fixed value in the config is an error.
        also: another value that agrees with this one.
        adds: code states the value, so that an absent key has it, too.
        replaces: it replaces any value of the config.
        stated: the value of `name`, if that is another one.
    """

    value: object
    source: Source
    name: str
    must_match: bool = False
    also: object = None
    adds: bool = False
    replaces: bool = False
    stated: object = None


def fill(draft: Draft) -> Draft:
    """Return the draft with the known values, and without an "auto"."""
    tree, filled, findings = draft.tree, dict[Path, tuple[object, Source | None]](), list[Finding]()
    for name, offer in offers(draft).items():
        path = tuple(name.split("."))
        value = value_in(tree, path)
        around = [value_in(tree, path[:end]) for end in range(1, len(path))]
        if isinstance(value, Mapping) or not all(part is ABSENT or _is_section(part) for part in around):
            continue  # the schema reports it
        if value is ABSENT or value is None:
            is_filled = offer.adds or offer.replaces
        else:
            is_filled = offer.replaces or _is_open(value, draft.source(name), offer.source)
        if is_filled:
            later = is_auto(offer.value)  # filled when training starts
            tree, filled[path] = with_value(tree, path, offer.value), (offer.value, None if later else offer.source)
        elif offer.must_match and value not in (ABSENT, None) and not _agrees(value, offer):
            findings.append(conflict(draft, path, value, offer))
    autos = set[str]()
    tree = dict(_without_autos(tree, "", autos))
    findings += [Remark(path, '"auto" was not filled in; treated as unset', "auto") for path in sorted(autos)]
    return draft.plus(findings, tree=tree, filled=filled, autos=frozenset(autos))


def _is_section(value: object) -> bool:
    return value is None or isinstance(value, Mapping)


def _is_open(value: object, source: Source, offered: Source) -> bool:
    """Whether the value is "auto", or may be replaced: a placeholder, or a value that was "auto" before."""
    before = {source.kind, offered.kind}
    return is_auto(value) or source.kind == "default" or any(before <= family for family in _MAY_RETURN)


def _without_autos(tree: Mapping[str, Any], path: str, autos: set[str]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        where = key_path(path, key)
        if not is_auto(value) or auto_is_a_value(where):
            yield key, _inner(value, where, autos)
        else:
            autos.add(where)


def _inner(value: object, path: str, autos: set[str]) -> object:
    if isinstance(value, list):
        return [_inner(entry, f"{path}[{index}]", autos) for index, entry in enumerate(value)]
    return dict(_without_autos(value, path, autos)) if isinstance(value, Mapping) else value


def _agrees(value: object, offer: Offer) -> bool:
    return same(value, offer.value) or same(value, offer.also)


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


def conflict(draft: Draft, keys: Path, value: object, offer: Offer) -> Problem:
    """Return the problem of a fixed value that differs from the one stated elsewhere.

    Only an explicit flag can replace the written value; a default of TrainingArguments cannot.
    """
    stated = offer.value if offer.stated is None else offer.stated
    shown = stated if isinstance(stated, (numbers.Number, list)) else str(stated)
    path, rule = dotted(keys), "the config and TrainingArguments must have the same value"
    fix = 'write "auto" in the config so that it follows, or make the two equal'
    edit = Edit(keys, value="auto") if offer.source.kind == "flag" else None
    other = Other(offer.name, shown, str(offer.source))
    return Problem(path, value, rule, fix, origin=str(draft.source(path)), other=other, edit=edit)


def offers(draft: Draft) -> dict[str, Offer]:
    """Return offers by key path. Trainer takes precedence over Accelerate, and both over other sources."""
    by_path: dict[str, Offer] = {}
    for path, offer in _all(draft, draft.tree, draft.views):
        by_path.setdefault(path, offer)
    return by_path


def _all(draft: Draft, config: Mapping[str, Any], views: Views) -> Iterator[tuple[str, Offer]]:
    size = views.sequence_size or _fixed(config.get(SEQUENCE)) or 1
    data_ranks = max(1, views.world_size // max(1, size))
    if views.training is not None:
        if not views.training.steps_only:
            yield from _from_training(config, views.training, data_ranks, size)
        yield from _steps(config, views.training)
    if views.accelerator is not None:
        for path, given in views.accelerator.launched.items():
            yield path, Offer(given.value, given.source, given.source.text)
        if draft.source(STEPS).kind == "default":  # a placeholder
            config = {**config, STEPS: None}
        yield from _from_prepare(config, views.accelerator, data_ranks, states=views.training is None)
    hidden = hidden_size(views.model)
    if hidden is not None:
        for path, formula in SIZED_BY_MODEL.items():
            yield path, Offer(formula(hidden.value), hidden.source, "model size")
    rate = value_in(config, ("optimizer", "params", "lr"))
    if isinstance(rate, (int, float)) and not isinstance(rate, bool):
        yield "scheduler.params.warmup_max_lr", Offer(rate, Source("derived", "optimizer.params.lr"), "lr")


def _from_training(
    config: Mapping[str, Any], view: TrainingView, data_ranks: int, sequence_size: int
) -> Iterator[tuple[str, Offer]]:
    def stated(value: object, *names: str, must_match: bool = True, adds: bool = False) -> Offer:
        return Offer(value, view.source(*names), " and ".join(names), must_match, adds=adds)

    micro, steps, total = view.per_device_train_batch_size, view.gradient_accumulation_steps, config.get(TRAIN)
    fixed = not view.batch_size_may_vary
    adds_micro = fixed or total is None or is_auto(total)
    yield MICRO, stated(micro, "per_device_train_batch_size", must_match=fixed, adds=adds_micro)
    yield STEPS, stated(steps, "gradient_accumulation_steps", adds=True)
    shown = f"world size {data_ranks}" if sequence_size == 1 else f"data ranks {data_ranks}"
    product = f"per_device_train_batch_size {micro} x gradient_accumulation_steps {steps} x {shown}"
    whole = view.source("per_device_train_batch_size", "gradient_accumulation_steps")
    yield TRAIN, Offer(data_ranks * micro * steps, whole, product, fixed)  # never added: it follows from the others
    yield "gradient_clipping", stated(view.max_grad_norm or 0.0, "max_grad_norm", adds=True)
    optimizer = _Choice.of(config, "optimizer")
    for name, value, fields in (
        ("lr", view.learning_rate, ("learning_rate",)),
        ("betas", [view.adam_beta1, view.adam_beta2], ("adam_beta1", "adam_beta2")),
        ("eps", view.adam_epsilon, ("adam_epsilon",)),
        ("weight_decay", view.weight_decay, ("weight_decay",)),
    ):
        # The defaults of adam_beta1 and the like only apply to Adam.
        states = name in ("lr", "weight_decay") or not all(map(view.is_default, fields)) or optimizer.is_adam
        if not optimizer.is_foreign(name):
            yield f"optimizer.params.{name}", stated(value, *fields, adds=states and optimizer.accepts(name))
    scheduler = _Choice.of(config, "scheduler")
    yield "scheduler.params.warmup_min_lr", Offer(0, Source("training", "Trainer: warm-up starts at 0"), "warm-up")
    adds_rate = scheduler.accepts("warmup_max_lr")
    yield "scheduler.params.warmup_max_lr", stated(view.learning_rate, "learning_rate", adds=adds_rate)
    for name, trains, evaluates in (("fp16", view.fp16, view.fp16_full_eval), ("bf16", view.bf16, view.bf16_full_eval)):
        offer = stated(trains or evaluates, name if trains or not evaluates else f"{name}_full_eval", adds=trains)
        yield f"{name}.enabled", offer
        if name == "fp16" and trains and config.get("fp16") is None:
            yield "fp16.auto_cast", Offer(True, offer.source, offer.name, adds=True)
    if view.save_on_each_node:  # the only key that Trainer sets in any case
        path, source = "checkpoint.use_node_local_storage", view.source("save_on_each_node")
        yield path, Offer(True, source, "save_on_each_node", replaces=True)


def _steps(config: Mapping[str, Any], view: TrainingView) -> Iterator[tuple[str, Offer]]:
    warmup, by_flag, scheduler = view.warmup(), "max_steps" in view.origins, _Choice.of(config, "scheduler")
    later = Offer("auto", view.source("max_steps"), "max_steps")
    path, adds = "scheduler.params.total_num_steps", scheduler.accepts("total_num_steps")
    if view.total_steps is not None:
        name = "max_steps" if by_flag else "updates of this run"
        source = view.source("max_steps") if by_flag else Source("training", "Trainer: epochs x batches, or max_steps")
        yield path, Offer(view.total_steps, source, name, must_match=True, adds=adds)
    elif adds:
        yield path, replace(later, adds=True)
    path, adds = "scheduler.params.warmup_num_steps", scheduler.accepts("warmup_num_steps")
    # TrainingArguments have no warm-up by default; a schedule with warm-up then keeps its own number.
    adds = adds and not view.is_default("warmup_steps")
    if warmup is not None:
        also, source, name = 0 if view.warmup_steps == 0 else None, view.source("warmup_steps"), "warmup_steps"
        stated = int(view.warmup_steps) if view.warmup_steps == 0 else None  # a schedule needs at least 1
        if 0 < view.warmup_steps < 1:
            name = f"warmup_steps {view.warmup_steps:g} x {view.total_steps} updates"
        yield path, Offer(warmup, source, name, must_match=True, also=also, adds=adds, stated=stated)
    elif adds:
        yield path, replace(later, adds=True)


def _from_prepare(
    config: Mapping[str, Any], view: AcceleratorView, data_ranks: int, states: bool
) -> Iterator[tuple[str, Offer]]:
    def stated(value: object, text: str, adds: bool = False) -> Offer:
        return Offer(value, Source("script", text), text, adds=states and adds)

    default = Source("accelerator", "Accelerate's default")
    steps = view.accumulation_steps
    if steps is not None:
        yield STEPS, stated(steps, "Accelerator(gradient_accumulation_steps)")
    if view.batch_sizes:
        micro = max(view.batch_sizes) if view.take_largest_batch else min(view.batch_sizes)
        yield MICRO, stated(micro, "batch_size of the dataloader given to prepare()")
        micro, steps = _fixed(config.get(MICRO)) or micro, _fixed(config.get(STEPS)) or steps
        yield TRAIN, stated(micro * (steps or 1) * data_ranks, "micro batch x accumulation steps x processes")
    if view.prepares:
        yield "gradient_clipping", Offer(1.0, default, "default")
        yield "zero_optimization.stage3_gather_16bit_weights_on_model_save", Offer(False, default, "default")
    optimizer, scheduler = _Choice.of(config, "optimizer"), _Choice.of(config, "scheduler")
    for name, value in view.optimizer.items():
        if not optimizer.is_foreign(name):
            adds = value != _STAND_IN_DEFAULTS.get(name) and optimizer.accepts(name)
            yield f"optimizer.params.{name}", stated(value, f"DummyOptim({name})", adds)
    for name, value in view.schedule.items():
        adds = not (name == "warmup_num_steps" and value == 1) and scheduler.accepts(name)
        yield f"scheduler.params.{name}", stated(value, f"DummyScheduler({name})", adds)
    if view.schedule:
        yield "scheduler.params.warmup_min_lr", Offer(0, default, "default")
    if view.max_lr is not None:
        yield "scheduler.params.warmup_max_lr", stated(view.max_lr, "the learning rate of the optimizer")


def _fixed(value: object) -> int | None:
    try:
        return None if value is None or is_auto(value) else as_whole(value)
    except ValueError:
        return None  # reported as a separate problem


@dataclass(frozen=True, slots=True)
class _Choice:
    """The section `optimizer` or `scheduler`, as far as it is valid; its errors are reported elsewhere."""

    section: str
    kind: str | None = None
    params: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], section: str) -> _Choice:
        kind, params = value_in(config, (section, "type")), value_in(config, (section, "params"))
        params = {} if params in (ABSENT, None) else params
        return cls(section, kind if isinstance(kind, str) else None, params if isinstance(params, Mapping) else None)

    def accepts(self, argument: str) -> bool:
        """Whether its type accepts the argument."""
        if self.kind is None or self.params is None:
            return False
        if self.section == "scheduler":
            return schedule_accepts(self.kind, argument)
        return optimizer_accepts(self.kind, self.params, argument)

    def is_foreign(self, argument: str) -> bool:
        """Whether this is an argument of Adam, which TrainingArguments have, that its type does not accept."""
        if argument not in ("betas", "eps") or self.kind is None:
            return False
        return not optimizer_accepts(self.kind, self.params or {}, argument)

    @property
    def is_adam(self) -> bool:
        return self.kind is not None and is_adam(self.kind)


# Names of the hidden size in model configurations.
_NAMES = ("d_model", "n_embd", "model_dim", "embed_dim", "embedding_size", "dim", "hidden_dim")
# Sub-configurations with most of the parameters, tried first; the others follow in their own order.
_PARTS = ("text_config", "language_config", "llm_config", "decoder", "encoder", "vision_config", "audio_config")
_DEEPEST = 4


def hidden_size(model: ModelView | None) -> Given | None:
    """Return the hidden size, which determines bucket sizes, or None if it is not known."""
    if model is None:
        return None
    named = None if model.config is None else next(_in_config(model.config, "model.config"), None)
    return named or _from_shapes(model.shapes)


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
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _from_shapes(shapes: Iterable[tuple[int, ...]]) -> Given | None:
    """Return the most frequent matrix extent: each layer reads from or writes to the hidden state."""
    extents = Counter(extent for shape in shapes if len(shape) >= 2 for extent in {*shape[:2]} if extent > 1)
    if not extents:
        return None
    size = max(extents, key=lambda extent: (extents[extent], extent))
    return Given(value=size, source=Source("model", f"the shapes of its parameters ({extents[size]} have {size})"))
