"""Progressive layer drop (arXiv 2010.13369): layers are skipped by chance, deeper ones more often.

    theta(k) = (1 - theta) * exp(-gamma * max(0, k - 2)) + theta      in update k, from 1
    p_i      = 1 - i * (1 - theta(k)) / L                             layer i of L is kept; layer 0 always is

What a kept layer adds to its input is divided by p_i, so that its expectation is what it adds in evaluation. All ranks
draw the same: what is gathered from them stays in one order.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.extras.data_efficiency.layers import WrappedLayers, first_of, layer_stack, split_hidden, with_first
from hf_zero.extras.data_efficiency.policy import data_policy
from hf_zero.extras.data_efficiency.section import ProgressiveLayerDrop as LayerDropSection
from hf_zero.features import Progress, TrainingFeature


def theta_at(policy: LayerDropSection, update: int) -> float:
    """The share that is kept in the deepest layers, in an update (from 1)."""
    return (1.0 - policy.theta) * math.exp(-policy.gamma * max(0, update - 2)) + policy.theta


def keep_probability(theta: float, layer: int, num_layers: int) -> float:
    """Of one layer, from 0."""
    return 1.0 - layer * (1.0 - theta) / num_layers


class ProgressiveLayerDrop(TrainingFeature):
    """Layers of a model are left out while it trains."""

    name = "progressive_layer_drop"

    def __init__(self, policy: LayerDropSection, layers: list[nn.Module]) -> None:
        self.policy = policy
        self.num_layers = len(layers)
        self._progress = Progress(step=0, training=False)
        self._returns_tuple: bool | None = None  # what layers return; one that is skipped must return such, too
        self._wrapped = WrappedLayers()
        for number, layer in enumerate(layers):
            self._wrapped.wrap(layer, self._around(number, layer))

    def get_theta(self) -> float:
        """Of the update that is being made."""
        return theta_at(self.policy, self._progress.step + 1)

    def keeps(self, layer: int) -> bool:
        """What is drawn for a layer in the forward under way; the same whenever it is asked."""
        probability = keep_probability(self.get_theta(), layer, self.num_layers)
        draw = random.Random(f"{self._progress.step} {self._progress.micro_step} {layer}")
        return draw.random() < probability

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        # An evaluation may come before the backward of this forward, which recomputes layers.
        if progress.training:
            self._progress = progress
        return keywords

    def load_state_dict(self, state: Mapping[str, Any] | None, progress: Progress) -> None:
        self._progress = progress

    def close(self) -> None:
        self._wrapped.close()

    def _around(self, number: int, layer: nn.Module) -> Callable[..., Any]:
        def around(own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not layer.training:
                return own(*args, **kwargs)
            hidden, _ = split_hidden(args, kwargs)
            # Layer 0, which always runs, has been there before the others are asked.
            if self._returns_tuple is not None and not self.keeps(number):
                return (hidden,) if self._returns_tuple else hidden
            output = own(*args, **kwargs)
            self._returns_tuple = isinstance(output, tuple)
            share = keep_probability(self.get_theta(), number, self.num_layers)
            return with_first(output, hidden + (first_of(output) - hidden) / share)

        return around


def layer_drop_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature, where the config asks for it.

    Raises:
        ConfigError: the model has no list of layers.
    """
    policy = data_policy(resolved).layer_drop
    if policy is None:
        return None
    try:
        return ProgressiveLayerDrop(policy, layer_stack(model))
    except ValueError as error:
        raise ConfigError([Problem("progressive_layer_drop", True, str(error), "switch it off")]) from error
