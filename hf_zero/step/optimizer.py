"""The optimizer that `initialize` returns: a torch optimizer whose step is sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch

from hf_zero.layout.sharding import Sharding
from hf_zero.optim import Updater
from hf_zero.params.store import ParameterStore
from hf_zero.step.outcome import LateNorm
from hf_zero.step.outside import MODES
from hf_zero.step.sharded_step import ShardedStep, StepRules


class ZeroOptimizer(torch.optim.Optimizer):
    """A torch optimizer around a base optimizer, which updates this rank's shards of the masters.

    Attributes:
        optimizer: the base torch optimizer: the config's, or the program's own.
        param_groups: the base optimizer's, with this rank's masters as parameters. Programs may change options in it.
        state: the base optimizer's, by master.
        loss_scaler: the loss scale and its schedule; a constant 1 unless fp16 is used.
        parameter_offload: stage 3's hooks, for programs that remove them temporarily.
    """

    # For the code of hf_zero:
    #     updater: runs the base optimizer on the shards.
    #     sub_groups: what this rank updates.
    #     store: stores the model's weights.

    parameter_offload: Any  # absent below stage 3, because other libraries test for the attribute

    # Not initialised as a torch Optimizer on purpose: groups and state live in the base optimizer only. The base class
    # is there because torch's schedulers accept nothing else.
    def __init__(
        self,
        step: ShardedStep,
        store: ParameterStore,
        updater: Updater,
        sharding: Sharding,
        rules: StepRules,
    ) -> None:
        self.optimizer = updater.optimizer
        self.fragments: Any = None  # kept alive here; see hf_zero.api.parameter_access
        self.engine: Any = None  # weak proxy; the engine is created after its optimizer
        self.loss_scaler = step.factors.scaler
        self.updater = updater
        self.sub_groups = updater.sub_groups
        self.sharding = sharding
        self.store = store
        self.rules = rules
        self._step = step

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Python copies and pickles by this. In a copy, torch's class would replace `step` of this whole class."""
        raise TypeError(
            "an engine's optimizer can be neither copied nor pickled: it updates what the engine holds; save and load "
            "its state with optimizer.state_dict() and load_state_dict(), or engine.save_checkpoint()"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        self.updater.stager.finish_update()
        return self.optimizer.state

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        kept = dict(states)
        self.optimizer.state.clear()
        self.optimizer.state.update(kept)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in the next backward; 1 unless fp16 is used. A program may set it."""
        return self.loss_scaler.scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.loss_scaler.scale = float(scale)

    cur_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because of a non-finite gradient on any rank. Waits for the device."""
        return self._step.outcome is not None and self._step.outcome.skipped

    @property
    def knows_overflow(self) -> bool:
        """Whether `overflow` is known without waiting for the device."""
        return self._step.outcome is None or self._step.outcome.is_known

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm before clipping: of the pending gradients after `foresee_norm`, else of the last step; None
        before the first step. Waits for the device."""
        return self._step.grad_norm

    @property
    def late_norm(self) -> LateNorm | float | None:
        """`grad_norm` as a number that is read from the device on first use."""
        return self._step.late_norm

    @property
    def has_gradients(self) -> bool:
        """Whether an engine's backward has produced gradients since the last step; the same on all ranks."""
        return self._step.factors.has_any

    def foresee_norm(self) -> None:
        """Set `grad_norm` to the norm of the pending gradients. Collective; does not wait for the device."""
        self._step.foresee_norm()

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval` of a base optimizer that has them. At stage 0, where nothing is sharded and callers expect
        their own object, also its other attributes."""
        if not name.startswith("__") and "sharding" in self.__dict__:
            if name in MODES and callable(getattr(self.optimizer, name, None)):
                return partial(self._step.call_outside, name)
            if self.sharding.stage == 0 and hasattr(self.optimizer, name):
                return getattr(self.optimizer, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients since the last step.

        Args:
            set_to_none: accepted; gradients are always set to None.
        """
        self._step.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Not possible: the layout is fixed when the engine is created.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "add_param_group(): no update would reach these parameters, because buckets and shards are laid out by "
            "initialize(). Call it (accelerator.prepare()) again, with an optimizer that has them"
        )

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the optimizer state, in torch's format. `engine.save_checkpoint` writes all of it, in a
        form that other numbers of ranks can read."""
        self._step.wait_for_outcome()
        self.updater.stager.finish_update()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict` from the same rank of the same layout."""
        self._step.wait_for_outcome()
        self.updater.stager.finish_update()
        self.optimizer.load_state_dict(state_dict)
        self.updater.state_replaced()

    def __repr__(self) -> str:
        return f"ZeroOptimizer(stage={self.sharding.stage}, world={self.sharding.world}, {self.optimizer!r})"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients reduced since the last step. Collective. `engine.step` calls this and also advances the
        schedule and the counters: call that one.

        Raises:
            RuntimeError: if a closure is given, and as in `engine.step`.
        """
        if closure is not None:
            raise RuntimeError("a sharded step cannot re-evaluate a closure; call backward() and then step()")
        self._step.run()
