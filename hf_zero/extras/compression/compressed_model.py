"""A model under compression: its layers with what is done to them, moved on with every update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.comm import Collectives
from hf_zero.config import ConfigError
from hf_zero.extras.compression.bits import ActivationBits, WeightBits, check_groups, learn_together
from hf_zero.extras.compression.compressed_layer import CompressedLayer
from hf_zero.extras.compression.matching import Match, match_all
from hf_zero.extras.compression.policy import CompressionPolicy
from hf_zero.extras.compression.pruning import (
    Pruned,
    PrunedChannels,
    PrunedHeads,
    PrunedRows,
    SnipWeights,
    SparseWeights,
)
from hf_zero.features import ask_for
from hf_zero.log import logger
from hf_zero.params.sharded_parameter import of
from hf_zero.params.unsharding import reshard, unshard

_HANDLE = "_hf_zero_compression"
_PRUNED: dict[str, type[Pruned]] = {
    "sparse": SparseWeights,
    "rows": PrunedRows,
    "channels": PrunedChannels,
    "heads": PrunedHeads,
}
WORDS = {
    "weights": "weight quantization",
    "activations": "activation quantization",
    "sparse": "sparse pruning",
    "rows": "row pruning",
    "heads": "head pruning",
    "channels": "channel pruning",
}
GradientOf = Callable[[nn.Parameter], Tensor | None]


class CompressedModel:
    """What `init_compression` makes of a model; the model knows it, and `compression_of` finds it again.

    Attributes:
        matches: by technique which layers are meant.
        updates: applied since training began.
    """

    def __init__(self, model: nn.Module, policy: CompressionPolicy) -> None:
        """Raises ConfigError when the config does not fit the model."""
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
        for match in self.matches.get("weights", ()):
            assert self.policy.weights is not None
            self._layer(match).weight_bits = WeightBits(match.layer, match.rule, self.policy.weights)
        for match in self.matches.get("activations", ()):
            assert self.policy.activations is not None
            self._layer(match).activation_bits = ActivationBits(match.layer, match.rule, self.policy.activations)
        problems = []
        for technique, kind in _PRUNED.items():
            wanted = getattr(self.policy, technique)
            for match in self.matches.get(technique, ()):
                chosen = SnipWeights if wanted.method == "snip_momentum" else kind
                pruned = chosen(match.layer, match.rule, wanted)
                if isinstance(pruned, (SnipWeights, PrunedHeads)) and (problem := pruned.problem()) is not None:
                    problems.append(problem)
                self._layer(match).pruned[technique] = pruned
        if problems:
            raise ConfigError(problems)
        check_groups([layer.weight_bits for layer in self.layers if layer.weight_bits is not None])

    def _layer(self, match: Match) -> CompressedLayer:
        return self._layers.setdefault(match.layer.name, CompressedLayer(match.layer))

    def _add_scores(self) -> None:
        for pruned in self.pruned():
            if pruned.is_trained:
                with whole(pruned.layer.parameter):
                    pruned.add_scores(pruned.layer.parameter.detach())
        names = self.score_names()
        ignored = getattr(self.model, "_keys_to_ignore_on_save", None)
        if names and hasattr(self.model, "save_pretrained"):
            self.model._keys_to_ignore_on_save = {*(ignored or ()), *names}  # type: ignore[assignment]

    # What there is

    @property
    def layers(self) -> Sequence[CompressedLayer]:
        return list(self._layers.values())

    def pruned(self) -> Iterator[Pruned]:
        """Every pruning of every layer."""
        for layer in self.layers:
            yield from layer.pruned.values()

    def scores(self) -> list[nn.Parameter]:
        """Parameters that compression has added to the model."""
        found = [pruned.scores for pruned in self.pruned()]
        return [scores for scores in found if scores is not None]

    def score_names(self) -> list[str]:
        """Names of these parameters."""
        own = {id(scores) for scores in self.scores()}
        return [name for name, parameter in self.model.named_parameters() if id(parameter) in own]

    # Moving on

    def advance(self, updates: int) -> None:
        """So many updates have been applied. Collective at stage 3 where masks are fixed now."""
        self.updates = updates
        for layer in self.layers:
            if layer.weight_bits is not None:
                changed = layer.weight_bits.advance(updates)
                if changed is not None and layer.weight_bits.policy.verbose:
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
            with whole(pruned.layer.parameter):
                pruned.fix(pruned.layer.parameter, updates)

    def forget_masks(self) -> None:
        """Masks are chosen anew at the next `advance`: the weights have changed since."""
        for pruned in self.pruned():
            pruned.mask = None

    def _say_what_starts(self, updates: int) -> None:
        for technique, matches in self.matches.items():
            offset = getattr(self.policy, technique).offset
            if updates >= offset and technique not in self._started:
                self._started.add(technique)
                logger.info(
                    "%s of %d modules has begun (update %d, schedule_offset %d)",
                    WORDS[technique],
                    len(matches),
                    updates,
                    offset,
                )

    def follow_gradients(self, gradient_of: GradientOf) -> None:
        """Reduced gradients are there and not yet applied. Collective where snip_momentum follows them."""
        for pruned in self.pruned():
            if isinstance(pruned, SnipWeights) and pruned.follows:
                parameter = pruned.layer.parameter
                gradient = gradient_of(parameter)
                with whole(parameter):
                    if gradient is not None:
                        pruned.follow(parameter.detach(), gradient)

    def learn_ranges(self, collectives: Collectives) -> None:
        """Static ranges take in what all ranks have seen. Collective, if there are any."""
        bits = [layer.activation_bits for layer in self.layers if layer.activation_bits is not None]
        learn_together([one for one in bits if not one.policy.dynamic], collectives)

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Masks, scores of snip_momentum and ranges by layer, on the CPU; equal on all ranks."""
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
        """Go on where `state_dict` was taken. Layers that it does not know choose their masks as they begin."""
        masks, ranges = state.get("masks", {}), state.get("ranges", {})
        for pruned in self.pruned():
            saved = masks.get(pruned.layer.name, {})
            mask, score = saved.get(pruned.scores_name), saved.get("snip_momentum")
            pruned.mask = None if mask is None else mask.bool().clone()
            if isinstance(pruned, SnipWeights):
                pruned.resume(None if score is None else score.clone(), int(state["updates"]))
        for layer in self.layers:
            if layer.activation_bits is not None:
                found = ranges.get(layer.layer.name)
                layer.activation_bits.range = None if found is None else found.clone()
                layer.activation_bits.seen = None
        self.advance(int(state["updates"]))

    def close(self) -> None:
        """Take the hooks away; scores stay parameters of their modules."""
        for layer in self.layers:
            layer.unwatch()
        self.model.__dict__.pop(_HANDLE, None)


def compression_of(model: nn.Module) -> CompressedModel | None:
    """What compresses this model."""
    found: CompressedModel | None = model.__dict__.get(_HANDLE)
    return found


@contextmanager
def whole(*parameters: nn.Parameter) -> Iterator[None]:
    """Whole values of parameters that may be sharded. Collective, if they are."""
    handles = [handle for handle in map(of, parameters) if handle is not None]
    unshard(handles)
    try:
        yield
    finally:
        reshard(handles)
