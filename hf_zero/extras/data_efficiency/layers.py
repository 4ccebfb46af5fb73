"""Random-LTD (arXiv 2211.11586): some layers only process a random subset of tokens, drawn per layer and sample.

    hidden [B, S, h] --gather--> [B, r, h] --layer--> [B, r, h] --scatter--> [B, S, h]     other tokens pass unchanged

    kept tokens   r(t) = floor(t / T * (max - min) + min), rounded down to a multiple of d, at most max   (t: updates)

Kept tokens stay in order, so that a causal mask over them remains causal. Positions and masks are gathered with the
same indices. The draw depends only on (seed, update, micro-step, layer, rank): a recomputed layer and a resumed run
draw the same tokens.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.extras.data_efficiency.section import ProgressiveLayerDropSection as LayerDropSection
from hf_zero.extras.data_efficiency.section import RandomLTDPolicy, data_policy
from hf_zero.features import Progress, TrainingFeature

# The stack of layers of a model, and wrappers around their forward.


def layer_stack(model: nn.Module) -> list[nn.Module]:
    """The sequential layers of a model: its longest nn.ModuleList of modules of one class with parameters.

    Raises:
        ValueError: if there is no such list.
    """
    best: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, nn.ModuleList):
            continue
        layers = list(module)
        alike = layers and all(type(layer) is type(layers[0]) for layer in layers)
        if alike and len(layers) > len(best) and any(True for _ in layers[0].parameters()):
            best = layers
    if not best:
        raise ValueError(f"{type(model).__name__} has no list of layers of one class (torch.nn.ModuleList)")
    return best


class AroundLayers(TrainingFeature):
    """Replaces the forward of some layers by `around` until `close`.

    The layer's class, parameter names and hooks do not change: only the instance's `forward` is replaced, which runs
    inside the hooks that gather the layer's weights.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = tuple(layers)
        self.num_layers = len(layers)
        self._progress = Progress(step=0, training=False)
        for number, layer in enumerate(layers):
            self._wrap(number, layer)

    def _wrap(self, number: int, layer: nn.Module) -> None:
        own = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.around(number, own, args, kwargs) if layer.training else own(*args, **kwargs)

        vars(layer)["forward"] = forward

    @abstractmethod
    def around(self, number: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the output of layer `number` in training; `own` is its own forward."""

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        # An evaluation may come before the backward of this forward, which recomputes layers.
        if progress.training:
            self._progress = progress
        return keywords

    def load_state_dict(self, state: Mapping[str, Any] | None, progress: Progress) -> None:
        self._progress = progress

    def close(self) -> None:
        for layer in self.layers:
            vars(layer).pop("forward", None)


def split_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
    """The hidden states in a layer's arguments, and a function that returns the arguments with others."""
    if args:
        return args[0], lambda hidden: ((hidden, *args[1:]), kwargs)
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"], lambda hidden: (args, {**kwargs, "hidden_states": hidden})
    raise ValueError(f"a layer is called without hidden states (keywords: {', '.join(kwargs) or 'none'})")


def with_first(output: Any, first: Any) -> Any:
    """A layer's output with its hidden states replaced."""
    return (first, *output[1:]) if isinstance(output, tuple) else first


def first_of(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


_SECTION = "data_efficiency.data_routing.random_ltd"
_MIX = 0x9E3779B97F4A7C15


def kept_tokens(policy: RandomLTDPolicy, step: int) -> int:
    """Number of tokens that the layers keep in update `step`, from 0."""
    num_tokens = math.floor(step / policy.total_steps * (policy.max_tokens - policy.min_tokens) + policy.min_tokens)
    return min(num_tokens - num_tokens % policy.multiple, policy.max_tokens)


class RandomLTD(AroundLayers):
    """Token dropping in the listed layers of a model."""

    name = "random_ltd"

    def __init__(self, policy: RandomLTDPolicy, layers: list[nn.Module], batch_size: int) -> None:
        super().__init__(layers)
        self.policy = policy
        self._batch_size = batch_size
        self.consumed_layer_tokens = 0

    def current(self) -> int:
        """Number of tokens kept in the current update."""
        return kept_tokens(self.policy, self._progress.step)

    def layer_tokens(self, step: int) -> int:
        dense = self.policy.num_layers - self.num_layers
        return self._batch_size * (kept_tokens(self.policy, step) * self.num_layers + self.policy.max_tokens * dense)

    def get_total_layer_tokens(self, train_iters: int) -> int:
        return sum(self.layer_tokens(step) for step in range(train_iters))

    def holds_schedule(self, progress: Progress) -> bool:
        """With layer_token_lr_schedule: whether the LR schedule still waits for a full update's layer tokens."""
        if not self.policy.scales_schedule:
            return False
        whole = self._batch_size * self.policy.max_tokens * self.policy.num_layers
        after = self.consumed_layer_tokens + self.layer_tokens(progress.step - 1)
        return after // whole == self.consumed_layer_tokens // whole

    def after_step(self, progress: Progress, *, applied: bool) -> None:
        self.consumed_layer_tokens += self.layer_tokens(progress.step - 1)

    def state_dict(self) -> Mapping[str, Any]:
        return {
            "consumed_layer_tokens": self.consumed_layer_tokens,
            "current_steps": self._progress.step,
            "current_value": self.current(),
            "min_value": self.policy.min_tokens,
            "max_value": self.policy.max_tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, progress: Progress) -> None:
        super().load_state_dict(state, progress)
        known = (state or {}).get("consumed_layer_tokens")
        self.consumed_layer_tokens = int(known) if known is not None else self.get_total_layer_tokens(progress.step)

    def around(self, number: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, call = split_hidden(args, kwargs)
        dim = 0 if self.policy.sequence_first else 1
        kept, whole = self.current(), hidden.shape[dim]
        if kept >= whole:
            return own(*args, **kwargs)
        indices = self._draw(number, hidden.shape[1 - dim], whole, kept, hidden.device)
        chosen_args, chosen_kwargs = call(_take(hidden, indices, dim))
        mask_name = self.policy.mask_name
        gathered = {
            name: _gathered(value, indices, whole, is_mask=name == mask_name or "mask" in name)
            if name == mask_name or "mask" in name or "position" in name
            else value
            for name, value in chosen_kwargs.items()
        }
        rest = tuple(_gathered(value, indices, whole, is_mask=True) for value in chosen_args[1:])
        output = own(chosen_args[0], *rest, **gathered) if chosen_args else own(**gathered)
        return with_first(output, _put(hidden, first_of(output), indices, dim))

    def _draw(self, number: int, batch: int, whole: int, kept: int, device: torch.device) -> Tensor:
        """Draw the positions of the kept tokens: [B, kept], ascending."""
        mixed = self.policy.seed
        for part in (self._progress.step, self._progress.micro_step, number, self._progress.rank):
            mixed = (mixed * _MIX + part + 1) % (1 << 63)
        generator = torch.Generator(device).manual_seed(mixed)
        order = torch.rand((batch, whole), generator=generator, device=device).argsort(dim=1)
        return order[:, :kept].sort(dim=1).values


def _take(hidden: Tensor, indices: Tensor, dim: int) -> Tensor:
    places = indices if dim == 1 else indices.T
    return hidden.gather(dim, places[..., None].expand(*places.shape, hidden.shape[-1]))


def _put(hidden: Tensor, part: Tensor, indices: Tensor, dim: int) -> Tensor:
    places = indices if dim == 1 else indices.T
    return hidden.scatter(dim, places[..., None].expand(*places.shape, hidden.shape[-1]), part.to(hidden.dtype))


def _gathered(value: Any, indices: Tensor, whole: int, *, is_mask: bool) -> Any:
    """Select kept tokens in an argument that has positions: position ids and embeddings, 2-D and 4-D masks."""
    if isinstance(value, tuple):
        return tuple(_gathered(entry, indices, whole, is_mask=is_mask) for entry in value)
    if not isinstance(value, Tensor):
        if is_mask and value is not None and hasattr(value, "mask_mod"):
            return _block_mask(value, indices)
        return value
    batch, kept = indices.shape
    if value.dim() == 4 and value.shape[-1] == whole:
        value = value.expand(batch, *value.shape[1:])
        columns = indices[:, None, None, :].expand(batch, value.shape[1], value.shape[2], kept)
        value = value.gather(3, columns)
        if value.shape[2] != whole:
            return value
        return value.gather(2, indices[:, None, :, None].expand(batch, value.shape[1], kept, kept))
    if value.dim() == 1 and value.shape[0] == whole:  # cache positions are those of the whole batch
        return value[:kept]
    if value.dim() in (2, 3) and value.shape[1] == whole:
        value = value.expand(batch, *value.shape[1:])
        places = indices if value.dim() == 2 else indices[..., None].expand(batch, kept, value.shape[2])
        return value.gather(1, places)
    return value


def _block_mask(mask: Any, indices: Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    old, kept = mask.mask_mod, indices.shape[1]

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return old(b, h, indices[b, q], indices[b, kv])

    return create_block_mask(mask_mod, indices.shape[0], None, kept, kept, device=indices.device)


def random_ltd_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature, if the config enables it.

    Raises:
        ConfigError: if the model's layers differ from the section's.
    """
    policy = data_policy(resolved).random_ltd
    if policy is None:
        return None
    try:
        layers = layer_stack(model)
    except ValueError as error:
        problem = Problem(_SECTION, policy.num_layers, str(error), "disable random_ltd")
        raise ConfigError([problem]) from error
    if len(layers) != policy.num_layers:
        rule = f"{type(model).__name__} has {len(layers)} layers ({type(layers[0]).__name__})"
        raise ConfigError([Problem(f"{_SECTION}.total_layer_num", policy.num_layers, rule, f"write {len(layers)}")])
    chosen = [layers[number] for number in policy.layer_ids]
    return RandomLTD(policy, chosen, resolved.samples_per_update)


def convert_to_random_ltd(engine: Any, convert_type: type[nn.Module]) -> Any:
    """DeepSpeed's call after `initialize`. It only checks the layers, which the engine has already converted.

    Raises:
        RuntimeError: if random_ltd is not enabled in the config; ValueError: if its layers have another class.
    """
    feature = engine.training_features.named(RandomLTD.name)
    if feature is None:
        raise RuntimeError(f"convert_to_random_ltd: {_SECTION}.enabled is not set in the config of the engine")
    others = {type(layer).__name__ for layer in feature.layers if not isinstance(layer, convert_type)}
    if others:
        raise ValueError(
            f"convert_to_random_ltd(..., {convert_type.__name__}): the layers of the model are {', '.join(others)}"
        )
    return engine


def save_without_random_ltd(model: Any) -> dict[str, Any]:
    """The state dict of an engine or a model, whose names token dropping does not change."""
    weights: dict[str, Any] = getattr(model, "module", model).state_dict()
    return weights


# Progressive layer drop (arXiv 2010.13369): layers are skipped at random, deeper ones more often.
#
#     theta(k) = (1 - theta) * exp(-gamma * max(0, k - 2)) + theta      in update k, from 1
#     p_i      = 1 - i * (1 - theta(k)) / L                             layer i of L is kept; layer 0 always is
#
# The residual of a kept layer is divided by p_i, so that its expectation equals the residual in evaluation. All ranks
# draw the same layers, so that they gather the same weights in the same order.


def theta_at(policy: LayerDropSection, update: int) -> float:
    """theta(k): the keep probability that the deepest layers approach, in an update (from 1)."""
    return (1.0 - policy.theta) * math.exp(-policy.gamma * max(0, update - 2)) + policy.theta


def keep_probability(theta: float, layer: int, num_layers: int) -> float:
    """The probability that a layer (from 0) is kept."""
    return 1.0 - layer * (1.0 - theta) / num_layers


class ProgressiveLayerDrop(AroundLayers):
    """Skips random layers of a model during training."""

    name = "progressive_layer_drop"

    def __init__(self, policy: LayerDropSection, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.policy = policy
        self._returns_tuple: bool | None = None  # whether layers return tuples, which skipped ones must, too

    def get_theta(self) -> float:
        return theta_at(self.policy, self._progress.step + 1)

    def keeps(self, layer: int) -> bool:
        """Whether a layer runs in the current forward; deterministic."""
        probability = keep_probability(self.get_theta(), layer, self.num_layers)
        draw = random.Random(f"{self._progress.step} {self._progress.micro_step} {layer}")
        return draw.random() < probability

    def around(self, number: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, _ = split_hidden(args, kwargs)
        # Layer 0 always runs first and sets this.
        if self._returns_tuple is not None and not self.keeps(number):
            return (hidden,) if self._returns_tuple else hidden
        output = own(*args, **kwargs)
        self._returns_tuple = isinstance(output, tuple)
        share = keep_probability(self.get_theta(), number, self.num_layers)
        return with_first(output, hidden + (first_of(output) - hidden) / share)


def layer_drop_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature, if the config enables it.

    Raises:
        ConfigError: if the model has no list of layers.
    """
    policy = data_policy(resolved).layer_drop
    if policy is None:
        return None
    try:
        return ProgressiveLayerDrop(policy, layer_stack(model))
    except ValueError as error:
        raise ConfigError([Problem("progressive_layer_drop", True, str(error), "disable it")]) from error
