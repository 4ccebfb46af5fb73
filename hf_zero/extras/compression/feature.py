"""Compression as a training feature, which follows the engine's forwards and steps.

`TeacherLoss` is a loss that also pulls the model towards a teacher. It replaces `output.loss`, so that Trainer and
custom loops train with it.

    loss = labels * the model's own loss
         + logits * T^2 * cross entropy of softmax(teacher / T) and softmax(student / T)      mean over answers
         + hidden * sum over layers of the mean squared error of hidden states
         + attention * the same for attention maps

For a regression (one logit), the mean squared error replaces the cross entropy. If the caller passes the number of
items of an update (`num_items_in_batch`, as Trainer does), the teacher's terms are weighted by this batch's share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.config import ConfigError, Findings, Problem, Resolved
from hf_zero.errors import WrongArgument
from hf_zero.extras.compression.compressed_model import CompressedModel, compression_of
from hf_zero.extras.compression.matching import listing, match_all, nearest
from hf_zero.extras.compression.section import CompressionPolicy, LayerReduction
from hf_zero.extras.compression.section import Distillation as DistillationSection
from hf_zero.features import EngineTools, Progress, TrainingFeature
from hf_zero.log import logger

# Layer reduction: a student with some of a teacher's layers.
#
# Either the other layers are removed from the model in place, or a student that was built with fewer layers copies the
# parameters of the chosen ones.


_PATH = "compression_training.layer_reduction"
_NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers")


def reduce_layers(model: nn.Module, section: LayerReduction) -> None:
    """Keep only the chosen layers of `model`, and update its config.

    Raises:
        ConfigError: if the list of layers does not exist or is too short.
    """
    layers = _list_of_layers(model, section)
    before = len(layers)
    kept = nn.ModuleList([layers[index] for index in section.teacher_layer])
    parent, _, name = str(section.module_name_prefix).rpartition(".")
    setattr(model.get_submodule(parent), name, kept)
    _number(kept)
    _follow_in_config(getattr(model, "config", None), before, section.teacher_layer)
    logger.info("layer reduction: %s keeps %d of %d layers", section.module_name_prefix, len(kept), before)


def is_reduced(model: nn.Module, section: LayerReduction) -> bool:
    """Whether the model has the student's number of layers."""
    return len(_list_of_layers(model, section, checks_length=False)) == len(section.teacher_layer)


@torch.no_grad()
def take_over(student: nn.Module, teacher: nn.Module, section: LayerReduction) -> None:
    """Copy the chosen layers and other named modules of `teacher` into `student`. Collective at stage 3.

    Raises:
        ConfigError: if a name is missing in one of them, or shapes differ.
    """
    sources = _list_of_layers(teacher, section)
    targets = _list_of_layers(student, section, checks_length=False)
    if len(targets) != len(section.teacher_layer):
        rule = f"names {len(section.teacher_layer)} layers, but the student has {len(targets)}"
        fix = "build the student with as many layers (num_hidden_layers), or leave teacher_model out"
        raise ConfigError(Problem(f"{_PATH}.teacher_layer", list(section.teacher_layer), rule, fix))
    for target, index in zip(targets, section.teacher_layer, strict=True):
        _copy(target, sources[index], f"{section.module_name_prefix}.{index}")
    for name in section.other_module_name:
        _copy(_submodule(student, name), _submodule(teacher, name), name)


def _copy(target: nn.Module, source: nn.Module, name: str) -> None:
    theirs, own = dict(source.named_parameters()), dict(target.named_parameters())
    wrong = [key for key in {**theirs, **own} if key not in theirs or key not in own]
    wrong += [key for key in own if key in theirs and own[key].shape != theirs[key].shape]
    if wrong:
        rule = f"teacher and student differ in {name}: {', '.join(sorted(wrong)[:4])}"
        raise ConfigError(Problem(_PATH, name, rule, "build the student from the teacher's config with fewer layers"))
    with GatheredParameters(own.values(), modifier_rank=0), GatheredParameters(theirs.values()):
        for key, parameter in own.items():
            parameter.copy_(theirs[key].to(parameter.device, parameter.dtype))
    for key, buffer in target.named_buffers():
        buffer.copy_(source.get_buffer(key))


def _list_of_layers(model: nn.Module, section: LayerReduction, *, checks_length: bool = True) -> nn.ModuleList:
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    prefix = str(section.module_name_prefix)
    layers = lists.get(prefix)
    if layers is None:
        near = ", ".join(nearest(prefix, list(lists))) or "none"
        rule = "the model has no list of layers of this name"
        raise ConfigError(Problem(f"{_PATH}.module_name_prefix", prefix, rule, f"lists of layers: {near}"))
    if checks_length and section.teacher_layer[-1] >= len(layers):
        rule = f"{prefix} has the layers 0 to {len(layers) - 1}"
        raise ConfigError(Problem(f"{_PATH}.teacher_layer", list(section.teacher_layer), rule, "name these only"))
    return layers


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        near = ", ".join(nearest(name, [other for other, _ in model.named_modules() if other]))
        rule = "there is no module of this name"
        raise ConfigError(Problem(f"{_PATH}.other_module_name", name, rule, f"nearest: {near}")) from None


def _number(layers: nn.ModuleList) -> None:
    """Renumber layers, because KV caches are indexed by the layer number."""
    for position, layer in enumerate(layers):
        for module in layer.modules():
            for name in ("layer_idx", "layer_id"):
                if isinstance(vars(module).get(name), int):
                    setattr(module, name, position)


def _follow_in_config(config: Any, before: int, kept: Sequence[int]) -> None:
    """Update the number of layers in a config, and lists with one entry per layer."""
    if config is None:
        return
    values = dict(vars(config))
    for name, value in values.items():
        if name in _NUM_LAYERS and value == before:
            setattr(config, name, len(kept))
        elif name == "layer_types" and isinstance(value, list) and len(value) == before:
            setattr(config, name, [value[index] for index in kept])


_IGNORED = -100
_NOT_FOR_TEACHERS = ("labels", "num_items_in_batch", "return_loss")


class TeacherLoss:
    """Adds a teacher's terms to the loss.

    Args:
        teacher: runs the teacher's forward.
        teacher_layers: the teacher's layer for each layer of the student; empty: every k-th layer.
    """

    def __init__(
        self, policy: DistillationSection, teacher: Callable[..., Any], teacher_layers: Sequence[int] = ()
    ) -> None:
        self.policy = policy
        self.teacher = teacher
        self.teacher_layers = tuple(teacher_layers)

    def keywords(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the student's forward, extended to return the compared outputs."""
        arguments = dict(keywords)
        if self.policy.hidden_weight:
            arguments["output_hidden_states"] = True
        if self.policy.attention_weight:
            arguments["output_attentions"] = True
        return arguments

    def apply(self, inputs: Sequence[Any], keywords: Mapping[str, Any], output: Any) -> Any:
        """Replace the loss in `output`, and return it.

        Raises:
            WrongArgument: if the output has no loss, because no labels were passed.
        """
        if getattr(output, "loss", None) is None:
            raise WrongArgument(
                "distillation adds to output.loss, but the model returned none: pass labels to forward (under Trainer: "
                "no label_smoothing_factor and no compute_loss_func)"
            )
        asked = {key: value for key, value in keywords.items() if key not in _NOT_FOR_TEACHERS}
        with torch.no_grad():
            taught = self.teacher(*inputs, **asked)
        labels = keywords.get("labels")
        share = _share_of_update(labels, keywords.get("num_items_in_batch"))
        output["loss"] = self.policy.label_weight * output.loss + share * self.teachers_part(output, taught, labels)
        return output

    def teachers_part(self, output: Any, taught: Any, labels: Tensor | None = None) -> Tensor:
        """The teacher's terms of the loss, without the model's own loss."""
        policy = self.policy
        loss: Tensor = output.logits.new_zeros(())
        if policy.logit_weight:
            loss = loss + policy.logit_weight * logit_loss(output.logits, taught.logits, policy.temperature, labels)
        if policy.hidden_weight:
            own, theirs = output.hidden_states, taught.hidden_states
            pairs = zip(own, (theirs[index] for index in self._states(len(own), len(theirs))), strict=True)
            loss = loss + policy.hidden_weight * _squared_errors(pairs)
        if policy.attention_weight:
            own, theirs = _maps(output), _maps(taught)
            chosen = self.teacher_layers or _every(len(own), len(theirs))
            loss = loss + policy.attention_weight * _squared_errors(zip(own, (theirs[i] for i in chosen), strict=True))
        return loss

    def _states(self, own: int, theirs: int) -> list[int]:
        """Indices of the teacher's hidden states (embeddings first) to compare the student's with."""
        chosen = self.teacher_layers or _every(own - 1, theirs - 1)
        return [max(chosen[0] - 1, 0), *(index + 1 for index in chosen)]


def logit_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, labels: Tensor | None = None) -> Tensor:
    """Cross entropy with the teacher's probabilities, in fp32; the mean ignores positions whose label is -100."""
    own, theirs = student.float(), teacher.detach().float()
    if own.shape[-1] == 1:
        return functional.mse_loss(own, theirs)
    losses = -(theirs.div(temperature).softmax(-1) * own.div(temperature).log_softmax(-1)).sum(-1) * temperature**2
    if labels is None or labels.shape != losses.shape:
        return losses.mean()
    counts = (labels != _IGNORED).to(losses.dtype)
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def _share_of_update(labels: Tensor | None, num_items: Any) -> Tensor | float:
    """This batch's share of the update's items if the caller divides by their number, else 1."""
    if num_items is None or labels is None:
        return 1.0
    counted = (labels[..., 1:] if labels.dim() > 1 else labels) != _IGNORED
    share: Tensor = counted.sum() / num_items
    return share


def _every(own: int, theirs: int) -> list[int]:
    step = max(1, theirs // max(1, own))
    return [step * (index + 1) - 1 for index in range(own)]


def _maps(output: Any) -> Sequence[Tensor]:
    maps = output.attentions
    if not maps or maps[0] is None:
        raise WrongArgument(
            "hf_zero.distillation.attention_weight needs attention maps, which this attention does not return: load "
            'the model (and its teacher) with attn_implementation="eager", or set the weight to 0'
        )
    return list(maps)


def _squared_errors(pairs: Any) -> Tensor:
    errors = [functional.mse_loss(own.float(), theirs.detach().float()) for own, theirs in pairs]
    return torch.stack(errors).sum()


_TEACHER, _LEAVES = "_hf_zero_teacher", "_leaves_model"


class CompressionFeature(TrainingFeature):
    """Advances a compressed model with the engine's updates, and adds the teacher's terms to the loss."""

    name = "compression"

    def __init__(self, model: nn.Module, policy: CompressionPolicy, teacher: nn.Module | None) -> None:
        self.model = model
        self.policy = policy
        self.compressed = compression_of(model) or CompressedModel(model, policy)
        self._teacher = teacher
        self._distillation: TeacherLoss | None = None
        self._tools: EngineTools | None = None

    def adjust_groups(self, groups: list[dict[str, Any]]) -> None:
        """Add scores to the optimizer, without weight decay, and drop parameters that are no longer in the model."""
        members = {id(parameter) for parameter in self.model.parameters()}
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) in members or not vars(p).get(_LEAVES)]
        known = {id(parameter) for group in groups for parameter in group["params"]}
        missing = [scores for scores in self.compressed.scores() if id(scores) not in known]
        if missing and groups:
            without_decay = [group for group in groups if not group.get("weight_decay")]
            (without_decay or groups)[-1]["params"] += missing

    def begin(self, tools: EngineTools) -> None:
        self._tools = tools
        self.compressed.forget_masks()
        self.compressed.advance(self.compressed.updates)
        if self._teacher is not None and self.policy.distillation is not None:
            layers = self.policy.layers.teacher_layer if self.policy.layers is not None else ()
            self._distillation = TeacherLoss(self.policy.distillation, tools.forward_only(self._teacher), layers)

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        if self._distillation is not None and progress.training:
            return self._distillation.keywords(keywords)
        return keywords

    def after_forward(self, progress: Progress, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        if self._distillation is not None and progress.training:
            return self._distillation.apply(inputs, keywords, output)
        return output

    def before_step(self, progress: Progress) -> None:
        assert self._tools is not None
        self.compressed.follow_gradients(self._tools.full_gradient)

    def after_step(self, progress: Progress, *, applied: bool) -> None:
        assert self._tools is not None
        self.compressed.learn_ranges(self._tools.world)
        if applied:
            self.compressed.advance(self.compressed.updates + 1)

    def state_dict(self) -> Mapping[str, Any]:
        return self.compressed.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None, progress: Progress) -> None:
        if state is None:
            logger.info("the checkpoint has no state of compression: it continues at update %d", progress.step)
            self.compressed.forget_masks()
            self.compressed.advance(progress.step)
        else:
            self.compressed.load_state_dict(state)

    def close(self) -> None:
        """End training. Compression stays active until the model is cleaned."""
        self._distillation = self._tools = None


def compress(model: nn.Module, policy: CompressionPolicy, teacher_model: nn.Module | None = None) -> None:
    """Apply a policy to a model, unless it is already under compression. The default teacher is a copy of the model.

    Raises:
        ConfigError: if the policy does not fit the model.
    """
    if compression_of(model) is not None:
        return
    teacher = teacher_model
    if teacher is None and policy.distillation is not None:
        teacher = _teacher_of(model, policy.distillation.teacher)
    if policy.layers is not None:
        if teacher_model is not None and is_reduced(model, policy.layers):
            take_over(model, teacher_model, policy.layers)
        else:
            _mark_leaving(model)
            reduce_layers(model, policy.layers)
            _mark_leaving(model, leaves=False)
    compressed = CompressedModel(model, policy)
    if teacher is not None:
        teacher.eval().requires_grad_(False)
        model.__dict__[_TEACHER] = teacher
    for path, names in listing(compressed.matches).items():
        logger.info("%s: %d modules, from %s to %s", path, len(names), names[0], names[-1])
    compressed.advance(0)


def _teacher_of(model: nn.Module, folder: str | None) -> nn.Module:
    if folder is not None:
        loaded: nn.Module = type(model).from_pretrained(folder)  # type: ignore[attr-defined]
        return loaded
    with GatheredParameters(model.parameters()):
        return copy.deepcopy(model)


def _mark_leaving(model: nn.Module, *, leaves: bool = True) -> None:
    for parameter in model.parameters():
        vars(parameter)[_LEAVES] = leaves


def compression_feature(model: nn.Module, resolved: Resolved) -> CompressionFeature | None:
    """The feature, if the config enables compression or `init_compression` has been applied; else None."""
    known, policy = compression_of(model), resolved.extras.get("compression", CompressionPolicy())
    if known is None and not policy.is_on:
        return None
    compress(model, policy)
    return CompressionFeature(model, known.policy if known is not None else policy, model.__dict__.pop(_TEACHER, None))


def compression_words(findings: Findings, model: str | None) -> tuple[list[str], list[Problem]]:
    """Lines for `explain` with the modules that each rule matches, and problems with the model.

    Args:
        model: folder, config.json or hub name of the model; None: only a hint to give one.
    """
    policy = findings.extras["compression"]
    if model is None:
        return ["compression_training: give --model to see which modules each rule matches"], []
    try:
        built = _without_weights(model)
        if policy.layers is not None:
            reduce_layers(built, policy.layers)
        modules = listing(match_all(built, policy))
    except ConfigError as error:
        return [], list(error.problems)
    lines = [f"{path}: {len(names)} modules: {_few(names)}" for path, names in modules.items()]
    if policy.layers is not None:
        kept = ", ".join(map(str, policy.layers.teacher_layer))
        lines.insert(0, f"compression_training.layer_reduction: {policy.layers.module_name_prefix} keeps layers {kept}")
    return lines, []


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} ... {names[-1]}"


def _without_weights(model: str) -> Any:
    """Build the model on the meta device, with the class named in its config."""
    import transformers

    from hf_zero.explain.views import config_file

    config = transformers.AutoConfig.from_pretrained(config_file(model))
    kind = getattr(transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel)
    with torch.device("meta"):
        return kind.from_config(config) if kind is transformers.AutoModel else kind(config)
