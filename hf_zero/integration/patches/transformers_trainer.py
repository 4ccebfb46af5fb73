"""transformers.trainer: the best model, the learning rate in the log, queries after every step, and token counts.

With sequence parallelism every token of an update has the same weight, as in one process. Upstream, Trainer omits
`num_items_in_batch` there: a micro-batch's loss is the mean over the tokens of its whole sequences, and an update's
loss is the mean over micro-batches and data ranks, regardless of their numbers of tokens. Here:

    loss of a micro-batch  x  its tokens, on all ranks that share it  /  tokens of the update, on all ranks
                           x  data ranks, over which the engine takes the mean
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hf_zero.api.engine import ZeroEngine
from hf_zero.api.gathered_parameters import load_whole
from hf_zero.api.run_words import end
from hf_zero.config.schema.whole import services_for
from hf_zero.integration.huggingface.late_numbers import as_float, filtered, late_norms, restore_filter
from hf_zero.integration.huggingface.samples import ranks_per_sample
from hf_zero.integration.patches import MARK, Function, Patches
from hf_zero.integration.patches.transformers import is_stage_3
from hf_zero.log import logger

_NOTED = "_hf_zero_tokens_of_update"
_LABELS = "shift_labels"
_IGNORED = -100


def shares_sequences(trainer: Any) -> bool:
    """Whether the loss of a training batch is combined from parts on several ranks."""
    parallelism = getattr(trainer.accelerator, "parallelism_config", None)
    return (
        parallelism is not None
        and parallelism.sp_backend == "deepspeed"
        and parallelism.sp_enabled
        and isinstance(trainer.model_wrapped, ZeroEngine)
    )


def note_tokens(trainer: Any, batches: Sequence[Any], device: Any) -> None:
    """Count the tokens of an update, whose micro-batches on this rank are `batches`. Collective."""
    vars(trainer).pop(_NOTED, None)
    if not batches or not all(isinstance(batch.get(_LABELS), Tensor) for batch in batches):
        return
    counted = torch.stack([_num_tokens(batch) for batch in batches]).sum().to(device)
    # Without it, tokens are only averaged within each data rank, as elsewhere in Trainer.
    everywhere = trainer.args.average_tokens_across_devices
    groups = trainer.model_wrapped.groups
    (groups.world if everywhere else groups.sample).sum_small(counted)
    vars(trainer)[_NOTED] = counted / (groups.data.size * groups.ranks_per_sample if everywhere else 1)


def weigh_by_tokens(trainer: Any, inputs: Any, loss: Tensor) -> Tensor:
    """Scale a micro-batch's mean loss over tokens to its share of the update's loss. Collective."""
    of_update = vars(trainer).get(_NOTED)
    if of_update is None or not isinstance(inputs.get(_LABELS), Tensor):
        return loss
    own = _num_tokens(inputs)
    trainer.model_wrapped.groups.sample.sum_small(own)
    share = own / of_update.clamp(min=1)
    if not getattr(trainer, "loss_is_scaled_for_ga", None):  # then Trainer will divide by it
        share = share * trainer.current_gradient_accumulation_steps
    return cast(Tensor, loss * share.to(loss.dtype))


def refuse_losses_of_whole_sequences(trainer: Any) -> None:
    """
    Raises:
        ValueError: for `compute_loss_func`, which Trainer would ignore.
    """
    if trainer.compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func: where ranks share sequences (ParallelismConfig.sp_size = "
            f"{trainer.accelerator.parallelism_config.sp_size}), a rank has a part of every sequence, and such a "
            "function is written for whole ones: Trainer would take the model's own loss. Remove it, or train without "
            "sequence parallelism"
        )


def smoothed(model: Callable[..., Any], smoother: Callable[..., Tensor]) -> Callable[..., Any]:
    """The model's forward with the loss of `label_smoothing_factor`, of this rank's tokens."""

    def forward(**inputs: Any) -> Any:
        labels = inputs.pop(_LABELS)
        del inputs["labels"]  # with labels, a model may compute its loss without logits
        output = model(**inputs)
        output.loss = smoother(output, labels)
        return output

    return forward


def _num_tokens(batch: Any) -> Tensor:
    return cast(Tensor, batch[_LABELS] != _IGNORED).sum().to(torch.float64)


PATCHES = Patches("transformers.trainer")
_NO_PAIR = "save_only_model does not go with load_best_model_at_end"
_ONE_TRAINER = "each Trainer of a process needs TrainingArguments of its own"
_WAITS = "the host waits for the device after every step"
_NORM_IS_LATE = "Trainer keeps the norm as a tensor until it logs"
_PAIR_WORKS = "Trainer loads the best model from its weights, with whatever engine, instead of refusing the pair"


@PATCHES.add(
    "Trainer._get_learning_rate(self)",
    without="learning rates in the log are those of the next update",
    until="Trainer asks for the rate before the update, or asks the engine for that of the last one",
)
def around_get_learning_rate(original: Callable[..., float], self: Any) -> float:
    """Return the rate of the last update, as without an engine: Trainer queries it between the update and the step of
    its schedule, but a schedule of the engine has advanced with the update."""
    engine = self.model_wrapped
    if isinstance(engine, ZeroEngine) and engine.lr_scheduler is not None and engine.rates_of_last_update:
        rate = engine.rates_of_last_update[0]
        return original(self) if rate is None else rate
    return original(self)


@PATCHES.add(
    "Trainer.get_optimizer_group(self, param)",
    without="get_optimizer_group(param) compares a parameter with shards, which have other shapes",
    until="Trainer asks by identity, and the engine which group a parameter is in",
)
def around_get_optimizer_group(original: Function, self: Any, param: Any = None) -> Any:
    """Return the group in which the engine trains this parameter; groups themselves hold flat shards."""
    engine = self.model_wrapped
    assembly = engine.gradients.assembly if isinstance(engine, ZeroEngine) else None
    if assembly is None or param is None:
        return original(self, param)
    for parameter, spec in zip(assembly.store.parameters, assembly.store.layout.specs, strict=True):
        if parameter is param:
            return engine.optimizer.param_groups[spec.group]
    return original(self)  # as for a parameter that is in no group


@PATCHES.add(
    "Trainer.create_accelerator_and_postprocess(self)",
    without=f"{_NO_PAIR}, and {_ONE_TRAINER}",
    until=f"{_PAIR_WORKS}, and accelerate takes the plugin that it has",
)
def around_start(original: Callable[..., None], self: Any) -> None:
    """Trainer rejects this pair, because DeepSpeed can only load the best model from a full checkpoint. And accelerate
    rejects a plugin that it has already, from a Trainer with the same arguments."""
    args, plugin = self.args, self.args.deepspeed_plugin
    shown: dict[str, Any] = {}
    if args.save_only_model and args.load_best_model_at_end and plugin is not None:
        shown["load_best_model_at_end"] = False  # only read by the check that rejects the pair
    if plugin is not None and _is_in_use(plugin):
        shown["deepspeed_plugin"] = None  # accelerate goes on with the one that it has
    before = {name: getattr(args, name) for name in shown}
    vars(args).update(shown)
    try:
        original(self)
    finally:
        vars(args).update(before)


def _is_in_use(plugin: Any) -> bool:
    from accelerate.state import AcceleratorState

    return AcceleratorState._shared_state != {} and AcceleratorState().deepspeed_plugin is plugin


@PATCHES.add("Trainer._load_best_model(self)", without=_NO_PAIR, until=_PAIR_WORKS)
def around_load_best_model(original: Callable[..., None], self: Any) -> None:
    """Load the best model from weights only: Trainer's own code for runs without an engine reads them, and `load_whole`
    loads each tensor."""
    folder = Path(self.state.best_model_checkpoint)
    if not isinstance(self.model_wrapped, ZeroEngine) or any(folder.glob("global_step*")):
        original(self)
        return
    model = self.model
    vars(model)["load_state_dict"] = functools.partial(load_whole, model)
    self.is_deepspeed_enabled = False
    try:
        original(self)
    finally:
        self.is_deepspeed_enabled = True
        del vars(model)["load_state_dict"]


@PATCHES.add(
    "Trainer.get_batch_samples(self, epoch_iterator, num_batches, device)",
    without="a curriculum shortens batches in the engine, after Trainer has counted their tokens; where ranks share "
    "sequences, micro-batches of an update count alike, however many tokens they have",
    until="Trainer hands every training batch to a callback before it counts tokens, and deepspeed_sp_compute_loss "
    "takes num_items_in_batch",
)
def around_batches(original: Function, self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
    """Pass batches through the engine's features after the loader: only training batches come this way, after those
    that a resumed run skips, and before the tokens of an update are counted. With sequence parallelism, Trainer does
    not count them."""
    engine = self.model_wrapped
    if isinstance(engine, ZeroEngine) and (features := engine.training_features):
        epoch_iterator = (features.on_batch(engine.training_progress, batch) for batch in epoch_iterator)
    batches, num_items = original(self, epoch_iterator, num_batches, device)
    if shares_sequences(self):
        note_tokens(self, batches, device)
    return batches, num_items


@PATCHES.add(
    "Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)",
    without="where ranks share sequences, micro-batches of an update count alike, however many tokens they have, and "
    "label_smoothing_factor and compute_loss_func are ignored",
    until="deepspeed_sp_compute_loss takes num_items_in_batch and Trainer's losses",
)
def around_compute_loss(
    original: Function, self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """With sequence parallelism, upstream's loss is the model's own, its mean over the tokens of one micro-batch."""
    is_shared = self.model.training and shares_sequences(self)
    if is_shared:
        refuse_losses_of_whole_sequences(self)
        if self.label_smoother is not None and _LABELS in inputs:
            model = smoothed(model, self.label_smoother)
    result = original(self, model, inputs, return_outputs, num_items_in_batch)
    if not is_shared:
        return result
    loss, *outputs = result if return_outputs else (result,)
    loss = weigh_by_tokens(self, inputs, loss)
    return (loss, *outputs) if return_outputs else loss


@PATCHES.add(
    "Trainer._get_train_sampler(self, train_dataset)",
    without="samples are not chosen by data_efficiency.data_sampling",
    until="Trainer asks the engine for the sampler of its training data",
)
def around_train_sampler(original: Function, self: Any, train_dataset: Any = None) -> Any:
    """Use the curriculum over samples in ds.json, which other sampling strategies contradict."""
    dataset = self.train_dataset if train_dataset is None else train_dataset
    plugin = getattr(self.args, "deepspeed_plugin", None)
    if plugin is None or dataset is None or not hasattr(dataset, "__len__"):
        return original(self, train_dataset)
    args = self.args
    total = self.get_total_train_batch_size(args)  # per update: ranks that share samples count once
    makers = services_for(plugin.deepspeed_config, "train_sampler")
    samplers = (make(plugin.deepspeed_config, len(dataset), total) for make in makers)
    sampler = next((sampler for sampler in samplers if sampler is not None), None)
    if sampler is None:
        return original(self, train_dataset)
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy != "random":
        raise ValueError(
            f"TrainingArguments.train_sampling_strategy = {strategy!r} and data_efficiency.data_sampling in the "
            "config both choose samples: leave the strategy at 'random', or switch the section off"
        )
    return sampler


@PATCHES.add(
    "Trainer.train(self, resume_from_checkpoint, trial, ignore_keys_for_eval)",
    without="a training does not go on from host memory (hf_zero.resilience)",
    until="Trainer asks the engine where to resume from",
)
def around_train(original: Function, self: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
    """With hf_zero.resilience in ds.json, restarted ranks resume from their checkpoint in memory."""
    plugin = getattr(self.args, "deepspeed_plugin", None)
    config = {} if plugin is None else plugin.deepspeed_config
    for begin in services_for(config, "begin_training"):
        resume_from_checkpoint = begin(self, config, resume_from_checkpoint)
    return original(self, resume_from_checkpoint, *args, **options)


@PATCHES.add(
    "Trainer.evaluation_loop(self, dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)",
    without="with bf16_full_eval or fp16_full_eval, an evaluation outside of training fails at stage 3",
    until="Trainer asks an engine for the dtype of an evaluation instead of casting its weights",
)
def around_evaluation_loop(original: Function, self: Any, *args: Any, **options: Any) -> Any:
    """Evaluate at stage 3 in the dtype that the weights have, as evaluations during training do."""
    dtypes = {"bf16_full_eval": torch.bfloat16, "fp16_full_eval": torch.float16}
    set_names = [name for name in dtypes if getattr(self.args, name)]
    if not set_names or self.is_in_train or not is_stage_3():
        return original(self, *args, **options)
    for name in set_names:
        setattr(self.args, name, False)
    try:
        result = original(self, *args, **options)
    finally:
        for name in set_names:
            setattr(self.args, name, True)
    used = next((each.dtype for each in self.model.parameters() if each.is_floating_point()), None)
    for name in set_names:
        if used != dtypes[name]:
            _warn_of_full_eval(name, used)
    return result


@functools.cache
def _warn_of_full_eval(name: str, used: torch.dtype | None) -> None:
    logger.warning(
        "%s: evaluated in %s, because the weights of stage 3 keep their dtype. Set %s.enabled to true in the config to "
        "train and evaluate in it, or leave the option out",
        name,
        used,
        name[:4],
    )


@PATCHES.add("Trainer._clip_grad_norm(self, model)", without=_WAITS, until=_NORM_IS_LATE)
def around_clip_grad_norm(original: Function, self: Any, model: Any) -> Any:
    """Return a late norm, because Trainer requests the norm after every step but rarely uses it."""
    with _late_norms(self):
        return original(self, model)


@PATCHES.add("Trainer._get_grad_norm(self, model, grad_norm)", without=_WAITS, until=_NORM_IS_LATE)
def around_get_grad_norm(original: Function, self: Any, model: Any, grad_norm: Any = None) -> Any:
    """The same without clipping (max_grad_norm 0)."""
    with _late_norms(self):
        return original(self, model, grad_norm)


def _late_norms(trainer: Any) -> AbstractContextManager[None]:
    """`late_norms`, if our patch is called where a norm is logged: a subclass may override that method."""
    return late_norms(trainer) if hasattr(type(trainer)._maybe_log_save_evaluate, MARK) else nullcontext()


@PATCHES.add(
    "Trainer._maybe_log_save_evaluate(self, tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, "
    "learning_rate)",
    without=_WAITS,
    until=_NORM_IS_LATE,
)
def around_log(
    original: Callable[..., None], self: Any, tr_loss: Any, grad_norm: Any, *args: Any, **options: Any
) -> None:
    """Convert the norm to a float if it will be logged, so that histories, callbacks and trackers get floats."""
    restore_filter(self)
    original(self, tr_loss, as_float(grad_norm) if self.control.should_log else grad_norm, *args, **options)


@PATCHES.add(
    "Trainer.training_step(self, model, inputs, num_items_in_batch)",
    without="with logging_nan_inf_filter, which is Trainer's default, the host waits for every loss",
    until="Trainer's logging_nan_inf_filter chooses on the device, with torch.where",
)
def around_training_step(original: Function, self: Any, *args: Any, **options: Any) -> Any:
    """Filter NaN losses on the device, because Trainer would read the loss of every micro-batch for that."""
    restore_filter(self)
    return filtered(self, original(self, *args, **options))


@PATCHES.add(
    "Trainer._track_num_input_tokens(self, inputs)",
    without="num_input_tokens_seen counts every token of a tensor group as often as the group has ranks",
    until="Trainer divides what it has gathered by get_tp_size()",
)
def around_track_num_input_tokens(original: Callable[..., None], self: Any, inputs: Any) -> None:
    """Count the tokens of a tensor group, whose ranks see the same ones, once."""
    before = self.state.num_input_tokens_seen
    original(self, inputs)
    self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // ranks_per_sample()


@PATCHES.add(
    "Trainer._finalize_training(self, trial, num_train_samples, start_time)",
    without="how a training went is logged when the process ends",
    until="Trainer tells the engine that training has ended",
)
def around_finalize_training(original: Function, self: Any, *args: Any, **options: Any) -> Any:
    """Log one line when training has ended."""
    engine = self.model_wrapped
    output = original(self, *args, **options)
    if isinstance(engine, ZeroEngine):
        end(engine)
    return output
