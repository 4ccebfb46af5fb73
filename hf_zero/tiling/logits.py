"""Logits that have not been computed: a tensor with their shape that remembers what is done to them.

logits = head(hidden)          DeferredLogits, nothing computed
logits = logits / 8; tanh      remembered: the same is done to every tile later
loss_function(logits, ...)     tile by tile, in hf_zero.tiling.loss
anything else                  all of them are computed, once, and the operation gets them
"""

from __future__ import annotations

from collections.abc import Callable
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor

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
# Of one element each, so that a tile of the result is the result of a tile.
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
    """What a head returns instead of [..., vocabulary] logits.

    Attributes:
        hidden: what the head was given, [..., hidden].
        steps: what was done to the logits since, each a function of (some of) them.
    """

    changes_in_pieces = True  # read by what stands around a head that is cut
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
            width: of the vocabulary.
            make: the logits of hidden states, at once.
            on_use: told the operation for which they are all computed after all.
        """
        found: DeferredLogits = torch.Tensor._make_wrapper_subclass(
            DeferredLogits, (*hidden.shape[:-1], width), dtype=dtype, device=hidden.device
        )
        found.hidden, found.steps, found._make, found._on_use, found._made = hidden, [], make, on_use, None
        return found

    def after(self, step: Step) -> DeferredLogits:
        """The same with one more step."""
        probe = step(torch.zeros((1, self.shape[-1]), dtype=self.dtype, device=self.device))
        found = DeferredLogits.of(self.hidden, self.shape[-1], probe.dtype, self._make, self._on_use)
        found.steps = [*self.steps, step]
        return found

    def computed(self, operation: str) -> Tensor:
        """All of them, for an operation."""
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
        name = getattr(func, "__name__", repr(func))
        return func(*(_plain(arg, name) for arg in args), **{key: _plain(arg, name) for key, arg in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        return func(
            *(_plain(arg, name) for arg in args), **{key: _plain(arg, name) for key, arg in (kwargs or {}).items()}
        )


def _step(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    return lambda logits: func(logits, *args, **kwargs)


def _is_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """No other tensor has part in it, except single numbers."""
    return all(not isinstance(arg, Tensor) or arg.dim() == 0 for arg in (*args, *kwargs.values()))


def _plain(value: Any, operation: str) -> Any:
    if isinstance(value, DeferredLogits):
        return value.computed(operation)
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(element, operation) for element in value)
    return value
