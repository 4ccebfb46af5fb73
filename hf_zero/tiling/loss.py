"""The loss of a causal language model without full logits: the head runs inside the loss, tile by tile.

    model.forward       hidden -> head -> deferred logits -> model.loss_function
    loss_function       head(a job) -> one pass through the head's hooks, with all tiles in it -> the sum of losses

The head is called once for all tiles, so that stage 3 gathers its weights once. The sum is divided afterwards (by valid
tokens, or Trainer's num_items_in_batch), as in transformers' ForCausalLMLoss.

`DeferredLogits` is a tensor subclass with the shape of the logits that records operations instead of computing them:

logits = head(hidden)          DeferredLogits, nothing computed
logits = logits / 8; tanh      recorded, and later applied to every tile
loss_function(logits, ...)     computed tile by tile, in this module
anything else                  all logits are computed once, and passed to the operation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import GetSetDescriptorType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hf_zero.config import ConfigError, Problem, Resolved
from hf_zero.config.schema import long_sequences
from hf_zero.features import Progress, TrainingFeature, unwrapped
from hf_zero.log import logger
from hf_zero.tiling.compute import TiledFunction, autocasts, chunk_rows, tiled

Step = Callable[[Tensor], Tensor]

_DESCRIBED = ("data", "T", "H", "mT", "mH", "real", "imag", "grad")
_FACTS: frozenset[Any] = frozenset(
    [
        *(
            accessor.__get__
            for name in dir(Tensor)
            if isinstance(accessor := getattr(Tensor, name, None), GetSetDescriptorType) and name not in _DESCRIBED
        ),
        Tensor.size,
        Tensor.dim,
        Tensor.ndimension,
        Tensor.numel,
        Tensor.nelement,
        Tensor.is_floating_point,
        Tensor.__len__,
        torch.is_floating_point,
        torch.numel,
    ]
)
# Elementwise operations, for which a tile of the result is the result of a tile.
_NEW = frozenset(
    getattr(owner, name)
    for owner in (Tensor, torch)
    for name in "float half bfloat16 double to mul div add sub neg tanh clamp contiguous __mul__ __rmul__ __truediv__ "
    "__add__ __radd__ __sub__ __neg__ true_divide multiply divide".split()
    if hasattr(owner, name)
)
_IN_PLACE = frozenset(
    getattr(Tensor, name) for name in "mul_ div_ add_ sub_ tanh_ clamp_ __imul__ __itruediv__ __iadd__ __isub__".split()
)


class DeferredLogits(Tensor):
    """The output of the head in place of logits [..., vocabulary].

    Attributes:
        hidden: the head's input, [..., hidden].
        steps: recorded operations on the logits, as functions that also apply to tiles.
    """

    changes_in_pieces = True  # read by the output hooks of a tensor-parallel head
    hidden: Tensor
    steps: list[Step]
    _make: Callable[[Tensor], Tensor]
    _on_use: Callable[[str], None]
    _made: Tensor | None

    @staticmethod
    def of(
        hidden: Tensor, width: int, dtype: torch.dtype, make: Callable[[Tensor], Tensor], on_use: Callable[[str], None]
    ) -> DeferredLogits:
        """
        Args:
            width: size of the vocabulary.
            make: computes the logits of hidden states at once.
            on_use: called with the name of an operation that needs all logits.
        """
        deferred: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            DeferredLogits, (*hidden.shape[:-1], width), dtype=dtype, device=hidden.device
        )
        deferred.hidden, deferred.steps = hidden, []
        deferred._make, deferred._on_use, deferred._made = make, on_use, None
        return deferred

    def after(self, step: Step) -> DeferredLogits:
        """A copy with one more step."""
        probe = step(torch.zeros((1, self.shape[-1]), dtype=self.dtype, device=self.device))
        deferred = DeferredLogits.of(self.hidden, self.shape[-1], probe.dtype, self._make, self._on_use)
        deferred.steps = [*self.steps, step]
        return deferred

    def computed(self, operation: str) -> Tensor:
        """Compute all logits, for an operation."""
        if self._made is None:
            self._on_use(operation)
            logits = self._make(self.hidden)
            for step in self.steps:
                logits = step(logits)
            self._made = logits
        return self._made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        deferred = args[0] if args else None
        if isinstance(deferred, DeferredLogits) and deferred._made is None and _is_alone(args[1:], kwargs):
            step = _step(func, args[1:], kwargs)
            if func in _NEW:
                return deferred.after(step)
            if func in _IN_PLACE:
                deferred.steps.append(step)
                return deferred
        return _with_all_logits(func, getattr(func, "__name__", repr(func)), args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _with_all_logits(func, str(func), args, kwargs or {})


def _step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    return lambda logits: func(logits, *args, **kwargs)


def _is_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no other tensors are arguments, except scalars."""
    return all(not isinstance(arg, Tensor) or arg.dim() == 0 for arg in (*args, *kwargs.values()))


def _with_all_logits(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*(_plain(arg, name) for arg in args), **{key: _plain(arg, name) for key, arg in kwargs.items()})


def _plain(value: Any, operation: str) -> Any:
    if isinstance(value, DeferredLogits):
        return value.computed(operation)
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(element, operation) for element in value)
    return value


# Limits of a tile: bytes of its logits in fp32, and tokens, unless the hidden width is larger.
TILE_BYTES = 1 << 30
TILE_TOKENS = 1024
_LOSS = "ForCausalLMLoss"


def loss_tile_tokens(width: int, hidden: int) -> int:
    """Number of tokens per tile for the sizes of the vocabulary and hidden states."""
    return max(1, min(TILE_BYTES // (4 * width), max(TILE_TOKENS, hidden)))


@dataclass(frozen=True, slots=True)
class _Job:
    """Input of the head to compute the sum of the losses of all tokens in one call."""

    changes_in_pieces: ClassVar[bool] = True  # read by the output hooks of a tensor-parallel head
    hidden: Tensor  # [tokens, hidden]
    labels: Tensor  # [tokens]
    width: int
    ignore_index: int
    steps: Sequence[Step]
    eager: bool

    def run(
        self, head: Callable[[Tensor], Tensor], cross_entropy: Callable[..., Tensor], parameters: Sequence[Tensor]
    ) -> Tensor:
        """The sum of losses: scalar, fp32.

        Args:
            head: computes logits, or this rank's columns of them.
            cross_entropy: (those in fp32, labels, ignore_index) -> the sum of losses.
        """

        def call(tiles: Sequence[Tensor], _: Sequence[Tensor]) -> Tensor:
            hidden, labels = tiles
            logits = head(hidden)
            for step in self.steps:
                logits = step(logits)
            return cross_entropy(logits.float(), labels, ignore_index=self.ignore_index)

        tokens = len(self.labels)
        size = loss_tile_tokens(self.width, self.hidden.shape[-1])
        rows = chunk_rows(tokens, -(-tokens // size))
        tiling = TiledFunction(call=call, dim=0, rows=rows, join=None, eager=self.eager)
        return tiled(tiling, [self.hidden, self.labels], parameters=parameters)


@dataclass(frozen=True, slots=True)
class _AllLogits:
    """Input of the head to compute all logits after all; its hooks have already been called with the hidden states."""

    changes_in_pieces: ClassVar[bool] = True
    hidden: Tensor


class TiledLoss(TrainingFeature):
    """Computes head and loss of a model tile by tile in training forwards with labels."""

    name = "tiled_loss"
    waits_for_outcome = False

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: a transformers model, without PEFT's wrapper.

        Raises:
            ValueError: if its head or loss is not supported.
        """
        self._model = model
        self._head, self._width = _head_of(model)
        self._loss = _loss_of(model)
        self._own = self._head.forward
        self._had_loss = "_loss_function" in vars(model)
        self._defers = False
        self._said: set[str] = set()
        self._was_deferred = False
        vars(self._head)["forward"] = self._forward
        self._model.loss_function = self._tiled

    def before_forward(self, progress: Progress, keywords: dict[str, Any]) -> dict[str, Any]:
        labels = (keywords.get("labels"), keywords.get("shift_labels"))
        self._defers = progress.training and any(given is not None for given in labels)
        self._was_deferred = False
        if progress.training and not self._defers:
            self._say("the model gets no labels, so that all logits are needed (a custom loss of the trainer?)")
        return keywords

    def after_forward(self, progress: Progress, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> Any:
        if self._defers and not self._was_deferred:
            self._say(f"{type(self._model).__name__} computes its loss without calling its head")
        self._defers = False
        return output

    def close(self) -> None:
        vars(self._head).pop("forward", None)
        if self._had_loss:
            self._model.loss_function = self._loss
        else:
            vars(self._model).pop("_loss_function", None)

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            logger.warning("hf_zero.tiled_loss saves no memory here: %s", why)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """The head's forward, which runs inside its hooks."""
        if args and isinstance(args[0], _Job):
            return args[0].run(self._own, self._cross_entropy, list(self._head.parameters()))
        if args and isinstance(args[0], _AllLogits):
            return self._whole(args[0].hidden)
        if self._defers and len(args) == 1 and not kwargs and torch.is_grad_enabled():
            self._was_deferred = True
            return DeferredLogits.of(args[0], self._width, _dtype_of(args[0]), self._compute, self._on_use)
        return self._own(*args, **kwargs)

    @property
    def _cross_entropy(self) -> Callable[..., Tensor]:
        """That of columns of the logits, if the head is cut over ranks."""
        return vars(self._head).get("cross_entropy") or partial(functional.cross_entropy, reduction="sum")

    def _whole(self, hidden: Tensor) -> Tensor:
        """Logits of the whole vocabulary, which a tensor-parallel head gathers."""
        logits: Tensor = self._own(hidden)
        whole = vars(self._head).get("whole_output")
        return logits if whole is None else whole(logits)

    def _compute(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._head(_AllLogits(hidden))
        return logits

    def _on_use(self, operation: str) -> None:
        self._say(f"all logits are computed for {operation}()")

    def _tiled(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """transformers' ForCausalLMLoss for deferred or other logits."""
        has_labels = labels is not None or shift_labels is not None
        if not (isinstance(logits, DeferredLogits) and vocab_size == logits.shape[-1] and has_labels):
            return self._loss(
                logits=logits,
                labels=labels,
                vocab_size=vocab_size,
                num_items_in_batch=num_items_in_batch,
                ignore_index=ignore_index,
                shift_labels=shift_labels,
                **kwargs,
            )
        if shift_labels is None:
            assert labels is not None, "one of both is given"
            shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
        targets = shift_labels.reshape(-1).to(hidden.device)
        if len(targets) != len(hidden):
            raise ValueError(f"labels and hidden states have {len(targets)} and {len(hidden)} tokens")
        # In fp16, gradients of an unscaled loss would underflow; only backward knows the scale.
        eager = _dtype_of(hidden) != torch.float16
        total = self._head(_Job(hidden, targets, self._width, ignore_index, tuple(logits.steps), eager))
        return _divided(total, (targets != ignore_index).sum(), num_items_in_batch)


def has_tiled_loss(model: Any) -> bool:
    """Whether `TiledLoss` supports this model."""
    try:
        _head_of(model)
        _loss_of(model)
    except ValueError:
        return False
    return True


def _divided(total: Tensor, num_valid: Tensor, num_items: Any) -> Tensor:
    """The mean; without valid tokens NaN, as in transformers, with zero gradients."""
    if num_items is not None:
        return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)
    nan_if_empty = torch.where(num_valid > 0, 0.0, float("nan")).to(total.dtype)
    return total / num_valid.clamp(min=1) + nan_if_empty


def _dtype_of(hidden: Tensor) -> torch.dtype:
    """Output dtype of a linear layer for these hidden states, considering autocast."""
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if autocasts(kind) else hidden.dtype


def _head_of(model: Any) -> tuple[nn.Module, int]:
    """The head, and the full size of its vocabulary."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    width = getattr(head, "whole_width", getattr(head, "out_features", None))
    if not isinstance(head, nn.Module) or not isinstance(width, int):
        raise ValueError(f"{type(model).__name__} has no linear layer as its head (get_output_embeddings())")
    return head, width


def _loss_of(model: Any) -> Any:
    loss = getattr(model, "loss_function", None)
    if getattr(loss, "__name__", None) != _LOSS:
        name = getattr(loss, "__name__", None) or type(loss).__name__
        raise ValueError(
            f"{type(model).__name__} computes its loss with {name}; only transformers' {_LOSS} can be tiled"
        )
    return loss


def tiled_loss_of(model: nn.Module, resolved: Resolved) -> TrainingFeature | None:
    """The feature, if the config enables it.

    Raises:
        ConfigError: if the model's head or loss is not supported.
    """
    if not resolved.section(long_sequences.Tiling).tiled_loss:
        return None
    try:
        return TiledLoss(unwrapped(model))
    except ValueError as error:
        fix = "set it to false; deepspeed.runtime.sequence_parallel.ulysses_sp.TiledFusedLogitsLoss supports any loss"
        raise ConfigError([Problem("hf_zero.tiled_loss", True, str(error), fix)]) from error
