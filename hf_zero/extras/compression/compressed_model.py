"""A model under compression: its compressed layers, which follow their schedules with every update.

`CompressedLayer` is a layer with all its compression techniques, and with hooks that replace the weight in its module's
forward.

    before the module's forward     weight -> fewer bits -> * sparse -> * rows or channels -> * heads
                                    the first input -> fewer bits
    during it                       module.weight is that tensor: an attribute that shadows the parameter
    after it                        module.weight is the parameter again

The parameter keeps its name, its position in flat buffers and its shards; at stage 3 it has been gathered before the
hooks read it. Autograd propagates gradients from the tensor to the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.comm import Collectives
from hf_zero.config import ConfigError
from hf_zero.extras.compression.matching import Layer, match_all
from hf_zero.extras.compression.pruning import (
    ActivationBits,
    Pruned,
    PrunedChannels,
    PrunedHeads,
    PrunedRows,
    SnipWeights,
    SparseWeights,
    WeightBits,
    learn_together,
)
from hf_zero.extras.compression.section import CompressionPolicy
from hf_zero.features import ask_for
from hf_zero.log import logger


class CompressedLayer:
    """One compressed layer; `watch` registers its hooks, `unwatch` removes them."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.weight_bits: WeightBits | None = None
        self.activation_bits: ActivationBits | None = None
        self.pruned: dict[str, Pruned] = {}  # by technique, in the order in which they act
        self._handles: list[Any] = []

    def watch(self) -> None:
        host = self.layer.host
        self._handles = [
            host.register_forward_pre_hook(self._enter),
            host.register_forward_hook(self._leave, always_call=True),
        ]

    def unwatch(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def effective(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The tensors that replace weight and bias in forward."""
        if self.weight_bits is not None:
            weight = self.weight_bits.apply(weight)
        for pruned in self.pruned.values():
            mask = pruned.factor()
            if mask is not None:
                weight = weight * pruned.weight_factor(mask).to(weight.dtype)
                factor = pruned.bias_factor(mask)
                if bias is not None and factor is not None:
                    bias = bias * factor.to(bias.dtype)
        return weight, bias

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> Any:
        owner = self.layer.module
        weight = owner._parameters[self.layer.weight]
        bias = None if self.layer.bias is None else owner._parameters["bias"]
        assert weight is not None
        new_weight, new_bias = self.effective(weight, bias)
        # Instance attributes take precedence over a module's parameters.
        if new_weight is not weight:
            owner.__dict__[self.layer.weight] = new_weight
        if new_bias is not bias:
            owner.__dict__["bias"] = new_bias
        if self.activation_bits is None or not inputs or not isinstance(inputs[0], Tensor):
            return None
        return (self.activation_bits.apply(inputs[0]), *inputs[1:])

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self.layer.module.__dict__.pop(self.layer.weight, None)
        self.layer.module.__dict__.pop("bias", None)


_HANDLE = "_hf_zero_compression"
_PRUNED: dict[str, type[Pruned]] = {
    "sparse_pruning": SparseWeights,
    "row_pruning": PrunedRows,
    "head_pruning": PrunedHeads,
    "channel_pruning": PrunedChannels,
}
GradientOf = Callable[[nn.Parameter], Tensor | None]


class CompressedModel:
    """A model under compression, created by `init_compression`; `compression_of` returns it.

    Attributes:
        matches: the matched layers by technique.
        updates: number of updates applied since training began.
    """

    def __init__(self, model: nn.Module, policy: CompressionPolicy) -> None:
        """Raises ConfigError if the config does not fit the model."""
        self.model = model
        self.policy = policy
        self.updates = 0
        self.matches = match_all(model, policy)
        self._layers: dict[str, CompressedLayer] = {}
        self._started: set[str] = set()
        self._build()
        self._add_scores()
        for layer in self._layers.values():
            layer.watch()
        model.__dict__[_HANDLE] = self
        ask_for(model, "compression")

    # Building

    def _build(self) -> None:
        problems = []
        for technique, matches in self.matches.items():
            shared = self.policy.techniques[technique].shared
            for match in matches:
                layer = self._layers.setdefault(match.layer.name, CompressedLayer(match.layer))
                if technique == "weight_quantization":
                    layer.weight_bits = WeightBits(match.layer, match.rule, shared)
                    problems.append(layer.weight_bits.problem())
                elif technique == "activation_quantization":
                    layer.activation_bits = ActivationBits(match.layer, match.rule, shared)
                else:
                    kind = SnipWeights if shared.method == "snip_momentum" else _PRUNED[technique]
                    layer.pruned[technique] = kind(match.layer, match.rule, shared)
                    problems.append(layer.pruned[technique].problem())
        if any(problems):
            raise ConfigError([problem for problem in problems if problem is not None])

    def _add_scores(self) -> None:
        for pruned in self.pruned():
            if pruned.is_trained:
                with GatheredParameters(pruned.layer.parameter):
                    pruned.add_scores(pruned.layer.parameter.detach())
        names = self.score_names()
        ignored = getattr(self.model, "_keys_to_ignore_on_save", None)
        if names and hasattr(self.model, "save_pretrained"):
            self.model._keys_to_ignore_on_save = {*(ignored or ()), *names}  # type: ignore[assignment]

    # Contents

    @property
    def layers(self) -> Sequence[CompressedLayer]:
        return list(self._layers.values())

    def pruned(self) -> Iterator[Pruned]:
        for layer in self.layers:
            yield from layer.pruned.values()

    def scores(self) -> list[nn.Parameter]:
        """Parameters that compression has added to the model."""
        all_scores = [pruned.scores for pruned in self.pruned()]
        return [scores for scores in all_scores if scores is not None]

    def score_names(self) -> list[str]:
        """Names of these parameters."""
        own = {id(scores) for scores in self.scores()}
        return [name for name, parameter in self.model.named_parameters() if id(parameter) in own]

    # Schedules

    def advance(self, updates: int) -> None:
        """Set all schedules to this number of applied updates. Collective at stage 3 if masks are chosen."""
        self.updates = updates
        for layer in self.layers:
            if layer.weight_bits is not None:
                changed = layer.weight_bits.advance(updates)
                if changed is not None and layer.weight_bits.policy.quantize_verbose:
                    logger.info("update %d: %s has weights of %d bits", updates, layer.layer.name, changed.bits)
            if layer.activation_bits is not None:
                layer.activation_bits.advance(updates)
            for pruned in layer.pruned.values():
                pruned.advance(updates)
                self._fix(pruned, updates)
        self._say_what_starts(updates)

    @torch.no_grad()
    def _fix(self, pruned: Pruned, updates: int) -> None:
        if pruned.needs_mask(updates):
            with GatheredParameters(pruned.layer.parameter):
                pruned.fix(pruned.layer.parameter, updates)

    def forget_masks(self) -> None:
        """Drop all masks after a change of the weights; the next `advance` chooses new ones."""
        for pruned in self.pruned():
            pruned.mask = None

    def _say_what_starts(self, updates: int) -> None:
        for technique, matches in self.matches.items():
            offset = self.policy.techniques[technique].shared.schedule_offset
            if updates >= offset and technique not in self._started:
                self._started.add(technique)
                logger.info(
                    "%s of %d modules has begun (update %d, schedule_offset %d)",
                    technique.replace("_", " "),
                    len(matches),
                    updates,
                    offset,
                )

    def follow_gradients(self, gradient_of: GradientOf) -> None:
        """Update scores of snip_momentum from reduced gradients that are not yet applied. Collective if it is used."""
        for pruned in self.pruned():
            if isinstance(pruned, SnipWeights) and pruned.follows:
                parameter = pruned.layer.parameter
                gradient = gradient_of(parameter)
                with GatheredParameters(parameter):
                    if gradient is not None:
                        pruned.follow(parameter.detach(), gradient)

    def learn_ranges(self, collectives: Collectives) -> None:
        """Update static ranges with the inputs that all ranks have seen. Collective if there are any."""
        bits = [layer.activation_bits for layer in self.layers if layer.activation_bits is not None]
        learn_together([one for one in bits if not one.is_dynamic], collectives)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Masks, scores of snip_momentum, and ranges by layer, on the CPU; equal on all ranks."""
        masks: dict[str, dict[str, Tensor]] = {}
        for pruned in self.pruned():
            if pruned.mask is not None:
                masks.setdefault(pruned.layer.name, {})[pruned.scores_name] = pruned.mask.cpu()
            if isinstance(pruned, SnipWeights) and pruned.score is not None and pruned.follows:
                masks.setdefault(pruned.layer.name, {})["snip_momentum"] = pruned.score.cpu()
        ranges = {
            layer.layer.name: layer.activation_bits.range.cpu()
            for layer in self.layers
            if layer.activation_bits is not None and layer.activation_bits.range is not None
        }
        return {"updates": self.updates, "masks": masks, "ranges": ranges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Layers without an entry choose new masks."""
        masks, ranges = state.get("masks", {}), state.get("ranges", {})
        for pruned in self.pruned():
            saved = masks.get(pruned.layer.name, {})
            mask, score = saved.get(pruned.scores_name), saved.get("snip_momentum")
            pruned.mask = None if mask is None else mask.bool().clone()
            if isinstance(pruned, SnipWeights):
                pruned.resume(None if score is None else score.clone(), int(state["updates"]))
        for layer in self.layers:
            if layer.activation_bits is not None:
                own_range = ranges.get(layer.layer.name)
                layer.activation_bits.range = None if own_range is None else own_range.clone()
                layer.activation_bits.seen = None
        self.advance(int(state["updates"]))

    def close(self) -> None:
        """Remove the hooks; scores stay parameters of their modules."""
        for layer in self.layers:
            layer.unwatch()
        self.model.__dict__.pop(_HANDLE, None)


def compression_of(model: nn.Module) -> CompressedModel | None:
    """The `CompressedModel` of this model; None if it is not under compression."""
    compressed: CompressedModel | None = model.__dict__.get(_HANDLE)
    return compressed
