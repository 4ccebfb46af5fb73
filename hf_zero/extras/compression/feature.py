"""Compression as a training feature: what the engine's forwards and steps mean for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_zero.config import Resolved
from hf_zero.extras.compression.compressed_model import CompressedModel, compression_of, whole
from hf_zero.extras.compression.distillation import Distillation
from hf_zero.extras.compression.layer_reduction import is_reduced, reduce_layers, take_over
from hf_zero.extras.compression.matching import listing
from hf_zero.extras.compression.policy import CompressionPolicy
from hf_zero.features import EngineTools, Progress, TrainingFeature
from hf_zero.log import logger

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
            layers = self.policy.layers.teacher_layers if self.policy.layers is not None else ()
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
