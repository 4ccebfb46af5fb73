"""Loss scales for fp16: one that stays, and one that falls at overflows and grows while there are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_zero.config import LossScalePolicy

_FACTOR = 2.0


class LossScaler:
    """A scale that never changes; 1.0 where nothing needs scaling.

    Attributes:
        scale: factor on the loss before backward.
    """

    dynamic = False

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    @property
    def is_at_minimum(self) -> bool:
        """Whether another overflow could no longer be answered by a smaller scale."""
        return False

    def update(self, overflow: bool) -> None:
        """Record one update: whether a gradient was not finite anywhere."""

    def state_dict(self) -> dict[str, Any]:
        """Under the names that DeepSpeed's checkpoints use."""
        return {"cur_scale": self.scale, "dynamic": self.dynamic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A no-op: a fixed scale comes from the config."""


class DynamicLossScaler(LossScaler):
    """Halves at overflows, doubles after a window of clean updates.

    The first `hysteresis - 1` overflows since the last growth are forgiven; with `consecutive`, since the last clean
    update. Growth comes at the (window + 1)-th clean update after the start or an overflow, then every `window`.
    """

    dynamic = True

    def __init__(self, policy: LossScalePolicy) -> None:
        super().__init__(policy.initial)
        self._policy = policy
        # 0 would never reach 1, and the scale would never fall; it means what 1 means.
        self._patience = max(1, policy.hysteresis)
        self._left = self._patience
        self._updates = 0
        self._last_overflow = -1

    @property
    def forgives(self) -> int:
        """How many overflows would leave the scale as it is."""
        return self._left - 1

    @property
    def is_at_minimum(self) -> bool:
        return self._left == 1 and self.scale <= self._policy.minimum

    def update(self, overflow: bool) -> None:
        if overflow:
            self._fall()
        else:
            self._stay_or_grow()
        self._updates += 1

    def _fall(self) -> None:
        if self._left == 1:
            self.scale = max(self.scale / _FACTOR, self._policy.minimum)
        else:
            self._left -= 1
        self._last_overflow = self._updates

    def _stay_or_grow(self) -> None:
        clean = self._updates - self._last_overflow - 1
        grows = clean > 0 and clean % self._policy.window == 0
        if grows:
            self.scale *= _FACTOR
        if grows or self._policy.consecutive:
            self._left = self._patience

    def state_dict(self) -> dict[str, Any]:
        return {
            "cur_scale": self.scale,
            "dynamic": True,
            "cur_iter": self._updates,
            "last_overflow_iter": self._last_overflow,
            "scale_factor": _FACTOR,
            "scale_window": self._policy.window,
            "min_scale": self._policy.minimum,
            "delayed_shift": self._patience,
            "cur_hysteresis": self._left,
            "consecutive_hysteresis": self._policy.consecutive,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved scale; window, minimum and hysteresis stay those of this run's config."""
        if not state.get("dynamic", "cur_iter" in state):
            return
        self.scale = float(state["cur_scale"])
        self._updates = int(state["cur_iter"])
        self._last_overflow = int(state["last_overflow_iter"])
        self._left = min(self._patience, max(1, int(state.get("cur_hysteresis", self._patience))))


def loss_scaler_from(policy: LossScalePolicy | None) -> LossScaler:
    """None: nothing is scaled."""
    if policy is None:
        return LossScaler()
    return DynamicLossScaler(policy) if policy.fixed is None else LossScaler(policy.fixed)
