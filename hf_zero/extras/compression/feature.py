"""Compression as a training feature: what the engine's forwards and steps mean for it.

`Distillation` is a loss that also pulls the model towards a teacher. It takes the place of `output.loss`, so that
whatever reads that (Trainer, a loop of one's own) trains with it.

    loss = labels * the model's own loss
         + logits * T^2 * cross entropy of softmax(teacher / T) and softmax(student / T)      mean over answers
         + hidden * sum over layers of the mean squared error of hidden states
         + attention * the same of attention maps

A regression (one logit) has the mean squared error in the place of the cross entropy. Where the caller says how many
items an update has (`num_items_in_batch`, as Trainer does), the teacher's parts are weighted by this batch's share.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_zero.config import Resolved
from hf_zero.errors import WrongArgument
from hf_zero.extras.compression.compressed_model import CompressedModel, compression_of, whole
from hf_zero.extras.compression.layer_reduction import is_reduced, reduce_layers, take_over
from hf_zero.extras.compression.matching import listing
from hf_zero.extras.compression.policy import CompressionPolicy
from hf_zero.extras.compression.section import Distillation as DistillationSection
from hf_zero.features import EngineTools, Progress, TrainingFeature
from hf_zero.log import logger

_IGNORED = -100
_NOT_FOR_TEACHERS = ("labels", "num_items_in_batch", "return_loss")


class Distillation:
    """A teacher's part in the loss.

    Args:
        teacher: runs the teacher's forward.
        teacher_layers: the student's layers by their numbers in the teacher; empty: every k-th.
    """

    def __init__(
        self, policy: DistillationSection, teacher: Callable[..., Any], teacher_layers: Sequence[int] = ()
    ) -> None:
        self.policy = policy
        self.teacher = teacher
        self.teacher_layers = tuple(teacher_layers)

    def keywords(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """What the student's forward gets: also asked for what is compared."""
        found = dict(keywords)
        if self.policy.hidden_weight:
            found["output_hidden_states"] = True
        if self.policy.attention_weight:
            found["output_attentions"] = True
        return found

    def apply(self, inputs: Sequence[Any], keywords: Mapping[str, Any], output: Any) -> Any:
        """`output` with the new loss in it.

        Raises:
            WrongArgument: the output has no loss: the labels were kept back.
        """
        if getattr(output, "loss", None) is None:
            raise WrongArgument(
                "distillation adds to output.loss, and the model returned none: pass labels to forward (under Trainer: "
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
        """The loss without the model's own."""
        policy = self.policy
        found: Tensor = output.logits.new_zeros(())
        if policy.logit_weight:
            found = found + policy.logit_weight * logit_loss(output.logits, taught.logits, policy.temperature, labels)
        if policy.hidden_weight:
            own, theirs = output.hidden_states, taught.hidden_states
            pairs = zip(own, (theirs[index] for index in self._states(len(own), len(theirs))), strict=True)
            found = found + policy.hidden_weight * _squared_errors(pairs)
        if policy.attention_weight:
            own, theirs = _maps(output), _maps(taught)
            chosen = self.teacher_layers or _every(len(own), len(theirs))
            found = found + policy.attention_weight * _squared_errors(
                zip(own, (theirs[i] for i in chosen), strict=True)
            )
        return found

    def _states(self, own: int, theirs: int) -> list[int]:
        """Of the teacher's states (embeddings first) those that the student's are compared with."""
        chosen = self.teacher_layers or _every(own - 1, theirs - 1)
        return [max(chosen[0] - 1, 0), *(index + 1 for index in chosen)]


def logit_loss(student: Tensor, teacher: Tensor, temperature: float = 1.0, labels: Tensor | None = None) -> Tensor:
    """Soft cross entropy in fp32, mean over answers: those whose label is not -100, where there is one for each."""
    own, theirs = student.float(), teacher.detach().float()
    if own.shape[-1] == 1:
        return functional.mse_loss(own, theirs)
    each = -(theirs.div(temperature).softmax(-1) * own.div(temperature).log_softmax(-1)).sum(-1) * temperature**2
    if labels is None or labels.shape != each.shape:
        return each.mean()
    counts = (labels != _IGNORED).to(each.dtype)
    return (each * counts).sum() / counts.sum().clamp(min=1)


def _share_of_update(labels: Tensor | None, num_items: Any) -> Tensor | float:
    """What share of the update's items this batch has, where the caller divides by their number."""
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
            "hf_zero.distillation.attention_weight needs attention maps, which this attention does not make: load the "
            'model (and its teacher) with attn_implementation="eager", or set the weight to 0'
        )
    return list(maps)


def _squared_errors(pairs: Any) -> Tensor:
    errors = [functional.mse_loss(own.float(), theirs.detach().float()) for own, theirs in pairs]
    return torch.stack(errors).sum()


_TEACHER = "_hf_zero_teacher"


class Compression(TrainingFeature):
    """Moves a compressed model on with the engine's updates, and lets a teacher take part in the loss."""

    name = "compression"

    def __init__(self, model: nn.Module, policy: CompressionPolicy, teacher: nn.Module | None) -> None:
        self.model = model
        self.policy = policy
        self.compressed = compression_of(model) or CompressedModel(model, policy)
        self._teacher = teacher
        self._distillation: Distillation | None = None
        self._tools: EngineTools | None = None

    def adjust_groups(self, groups: list[dict[str, Any]]) -> None:
        """The optimizer trains the scores, without decay, and not what has left the model."""
        members = {id(parameter) for parameter in self.model.parameters()}
        for group in groups:
            group["params"] = [p for p in group["params"] if id(p) in members or not _has_left(p)]
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
            self._distillation = Distillation(self.policy.distillation, tools.forward_only(self._teacher), layers)

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
        """Masks and bits stay on: the model is compressed after training, too, until it is cleaned."""
        self._distillation = self._tools = None


def compress(model: nn.Module, policy: CompressionPolicy, teacher_model: nn.Module | None = None) -> None:
    """Do to a model what a policy says; once. Its teacher, if one is needed, is a copy of it or the one given.

    Raises:
        ConfigError: the policy does not fit the model.
    """
    if compression_of(model) is not None:
        return
    needs_teacher = policy.distillation is not None and teacher_model is None
    teacher = teacher_model
    if needs_teacher:
        assert policy.distillation is not None
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
    with whole(*model.parameters()):
        return copy.deepcopy(model)


def _mark_leaving(model: nn.Module, *, leaves: bool = True) -> None:
    for parameter in model.parameters():
        vars(parameter)["_leaves_model"] = leaves


def _has_left(parameter: nn.Parameter) -> bool:
    return bool(vars(parameter).get("_leaves_model"))


def compression_feature(model: nn.Module, resolved: Resolved) -> Compression | None:
    """The feature of a model whose config asks for compression, or to which `init_compression` has been applied."""
    known, policy = compression_of(model), resolved.extras.get("compression", CompressionPolicy())
    if known is None and not policy.is_on:
        return None
    compress(model, policy)
    return Compression(model, known.policy if known is not None else policy, model.__dict__.pop(_TEACHER, None))
