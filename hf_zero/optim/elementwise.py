"""Elementwise optimizers: alone on parameters, and fused on flat shards.

`LoneOptimizer` works like any torch optimizer: one update per parameter that has a gradient.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_zero.kernels.vectors import AS_IS, Applied, Vectors
from hf_zero.layout import Piece
from hf_zero.optim.stager import StateForm
from hf_zero.optim.updater import StepGradients, SubGroup, Updater


class LoneOptimizer(torch.optim.Optimizer):
    """The loop over groups and parameters around an update of one parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.begin_step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                    self.update(group, parameter, gradient)
        return loss

    def begin_step(self) -> None:  # noqa: B027
        """Called before the updates of a step. A no-op by default."""

    @abstractmethod
    def update(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        """Update one parameter (without autograd)."""


def flat_view(parameter: Tensor) -> Tensor:
    """The parameter as a vector: a view, or a copy if it is not contiguous."""
    return parameter.detach().reshape(-1)


def write_back(parameter: Tensor, flat: Tensor) -> None:
    """Copy `flat_view(parameter)` back if it is a copy."""
    if flat.data_ptr() != parameter.data_ptr():
        parameter.copy_(flat.view(parameter.shape))


def state_of(optimizer: torch.optim.Optimizer, parameter: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """A parameter's state, created at its first update: zeros under each name, and `step` in fp32 on the host."""
    state: dict[str, Any] = optimizer.state[parameter]
    for name in names:
        if state.get(name) is None:
            dtype = getattr(optimizer, "state_dtype", None) or parameter.dtype
            state[name] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)
    if not isinstance(state.get("step"), Tensor):  # a plain number in DeepSpeed's files
        state["step"] = torch.tensor(float(state.get("step", 0)), dtype=torch.float32, device="cpu")
    return state


class Family(ABC):
    """One update rule: the names of its states, and the call of its kernel. Stateless."""

    kind: type[Vectors] = Vectors  # of the kernel's inputs

    @abstractmethod
    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Names in `optimizer.state[parameter]`, in the kernel's order."""

    @abstractmethod
    def update(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], vectors: Vectors, step: int, applied: Applied
    ) -> None:
        """Run the kernel with the group's current hyperparameters, which schedulers change between steps."""

    def form_of(self, name: str) -> StateForm | None:
        """The storage format of this state; None: one value per element."""
        return None

    def state_of(self, optimizer: torch.optim.Optimizer, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The parameter's state, created at its first update: zeros, in the state's storage format."""
        state, names = optimizer.state[parameter], self.state_names(group)
        for name in names:
            form = self.form_of(name)
            if form is not None and state.get(name) is None:
                state[name] = form.zeros(parameter.numel(), parameter.device)
        return state_of(optimizer, parameter, names)

    def vectors(
        self, state: dict[str, Any], group: dict[str, Any], weight: Tensor, gradient: Tensor, lp_param: Tensor | None
    ) -> Vectors:
        """Inputs of the kernel for one parameter or shard, as 1-D views."""
        states = tuple(state[name].view(-1) for name in self.state_names(group))
        return self.kind(weight=weight, gradient=gradient, states=states, lp_param=lp_param)

    def update_alone(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, gradient: Tensor
    ) -> None:
        """Update a parameter in its own shape."""
        state = self.state_of(optimizer, parameter, group)
        state["step"] += 1
        weight = flat_view(parameter)
        vectors = self.vectors(state, group, weight, gradient.reshape(-1), None)
        self.update(optimizer, group, vectors, int(state["step"]), AS_IS)
        write_back(parameter, weight)


class ElementwiseOptimizer(LoneOptimizer):
    """A torch optimizer with one family, which also works without an engine."""

    family: Family
    state_dtype: torch.dtype | None = None  # None: the parameter's dtype

    def update(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        self.family.update_alone(self, group, parameter, gradient)


def check_rates(name: str, betas: Sequence[float] = (), **numbers: float) -> None:
    """Raise ValueError unless all numbers are at least 0 and all betas in [0, 1)."""
    if any(not number >= 0 for number in numbers.values()) or any(not 0 <= beta < 1 for beta in betas):
        shown = ", ".join(f"{key}={value}" for key, value in numbers.items())
        rule = f"{', '.join(numbers)} >= 0" + (" and betas in [0, 1)" if betas else "")
        got = shown + (f", betas={tuple(betas)}" if betas else "")
        raise ValueError(f"{name} needs {rule}, got {got}")


def has_none_of(optimizer: torch.optim.Optimizer, flags: Sequence[str]) -> bool:
    """Whether no group of a torch optimizer enables one of these options."""
    return not any(group.get(flag) for group in optimizer.param_groups for flag in flags)


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    if amsgrad:
        raise ValueError(
            f"amsgrad=True is not supported by {name}; use torch_adam: true with Adam or AdamW, or another optimizer"
        )


class StepRun(NamedTuple):
    """Elements `start` to `stop` of a shard, with `step` updates including the current one."""

    start: int
    stop: int
    step: int


@dataclass(slots=True)
class StepCounts:
    """Counts updates per piece of a sub-group: bias correction is per parameter, and not all are used in each step.

    Attributes:
        written: the `step` that the updater last wrote into the optimizer's state. Another value there is a program's
            (a reset of the states), and replaces the counts.
    """

    steps: list[int] = field(default_factory=list)
    written: int | None = None

    def follow(self, step: int) -> None:
        """Start again from `step`, the one in the optimizer's state, if a program has written it."""
        if self.written is not None and step != self.written:
            self.steps, self.written = [], None

    def count(self, pieces: Sequence[Piece], used: Set[int], start: int, change: int = 1) -> None:
        """Count one step for the used pieces, or with -1 undo that.

        `start` is the count of a piece without a counter (after loading a state).
        """
        steps = zip(pieces, self.steps or [start] * len(pieces), strict=True)
        self.steps = [step + change * (piece.parameter in used) for piece, step in steps]

    def advance(self, pieces: Sequence[Piece], used: Set[int], start: int = 0) -> list[StepRun]:
        """Count one step for the used pieces and return maximal runs to update."""
        self.count(pieces, used, start)
        runs: list[StepRun] = []
        joins_previous = False
        for piece, step in zip(pieces, self.steps, strict=True):
            is_used = piece.parameter in used
            if is_used:
                begin, stop = piece.in_shard, piece.in_shard + piece.numel
                if joins_previous and runs[-1].step == step:
                    begin = runs.pop().start
                runs.append(StepRun(begin, stop, step))
            joins_previous = is_used
        return runs


def with_padding(runs: Sequence[StepRun], sub_group: SubGroup) -> list[StepRun]:
    """Extend every run to the next piece, or to the sub-group's end.

    Vectorised kernels round the last few elements of a vector differently. With padding, which is always zero, these
    elements belong to no parameter, so a weight's bits do not depend on how weights are sharded.
    """
    starts = [piece.in_shard for piece in sub_group.pieces]
    whole = sub_group.master.numel()
    return [run._replace(stop=next((start for start in starts if start >= run.stop), whole)) for run in runs]


class CountingUpdater(Updater):
    """Counts updates per parameter on flat shards, and rolls them back."""

    obeys_skip = True

    def __init__(self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup]) -> None:
        super().__init__(optimizer, sub_groups)
        self.state_replaced()

    def state_replaced(self) -> None:
        """Continue counting from the loaded `step` in the optimizer's state."""
        self._counters = {sub_group: StepCounts() for sub_group in self.sub_groups}
        self._counted: list[tuple[SubGroup, int, Set[int]]] = []  # last step: sub-group, previous `step`, used

    def roll_back(self) -> None:
        for sub_group, step, used in self._counted:
            self._counters[sub_group].count(sub_group.pieces, used, step, -1)
            self._write_step(sub_group, step)
        self._counted = []

    def parameter_steps(self) -> dict[int, int]:
        self.stager.finish_update()
        for sub_group, counters in self._counters.items():
            counters.follow(self._read_step(sub_group))
        return {
            piece.parameter: steps
            for sub_group, counters in self._counters.items()
            for piece, steps in zip(sub_group.pieces, counters.steps, strict=False)
        }

    def restore_steps(self, steps: Mapping[int, int]) -> None:
        self.stager.finish_update()
        for sub_group, counters in self._counters.items():
            counters.written = known = self._read_step(sub_group)
            counters.steps = [steps.get(piece.parameter, known) for piece in sub_group.pieces]

    def set_steps(self, parameter: int, steps: int) -> None:
        self.stager.finish_update()
        for sub_group, counters in self._counters.items():
            if any(piece.parameter == parameter for piece in sub_group.pieces):
                known = self._read_step(sub_group)
                counters.follow(known)
                counters.count(sub_group.pieces, frozenset(), known)
                for place, piece in enumerate(sub_group.pieces):
                    if piece.parameter == parameter:
                        counters.steps[place] = steps
                counters.written = known

    def _read_step(self, sub_group: SubGroup) -> int:
        return int(self.optimizer.state.get(sub_group.tensors[0].parameter, {}).get("step", 0))

    def _write_step(self, sub_group: SubGroup, step: int) -> None:
        self.optimizer.state[sub_group.tensors[0].parameter]["step"].fill_(step)
        self._counters[sub_group].written = step

    def begin_step(self) -> None:
        # Schedulers warn unless their optimizer has stepped.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self._counted = []


def _frozen(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a param group as they are now."""
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}


class ElementwiseUpdater(CountingUpdater):
    """Runs one family on flat shards in one pass over memory; see the kernel's file for the formulas.

    Attributes:
        rounds_stochastically: whether 16-bit masters are rounded stochastically.
    """

    may_defer = True
    rounds_stochastically = False

    def __init__(self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup], family: Family) -> None:
        super().__init__(optimizer, sub_groups)
        self._family = family

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return self._family.state_names(group)

    def form_of(self, name: str) -> StateForm | None:
        return self._family.form_of(name)

    def step(self, gradients: StepGradients) -> Iterator[SubGroup]:
        self.begin_step()

        groups = [_frozen(group) for group in self.optimizer.param_groups]  # the update may be deferred

        def writes_all(sub_group: SubGroup) -> bool:
            return all(piece.parameter in gradients.used for piece in sub_group.pieces)

        def work(sub_group: SubGroup) -> None:
            self.update_sub_group(sub_group, gradients=gradients, group=groups[sub_group.group])

        return self.stager.each(gradients.wanted, work, writes_all=writes_all)

    @torch.no_grad()
    def update_sub_group(
        self,
        sub_group: SubGroup,
        gradients: StepGradients,
        reduced: Tensor | None = None,
        group: dict[str, Any] | None = None,
    ) -> None:
        """Update one sub-group with its reduced gradient.

        Args:
            reduced: the gradient, if it was already read.
            group: the options of its param group; None: as they are now.
        """
        reduced = gradients.of(sub_group) if reduced is None else reduced
        group = self.optimizer.param_groups[sub_group.group] if group is None else group
        state = self._family.state_of(self.optimizer, sub_group.tensors[0].parameter, group)
        before, counters = int(state["step"]), self._counters[sub_group]
        counters.follow(before)
        runs = counters.advance(sub_group.pieces, gradients.used, before)
        if not runs:
            return
        if gradients.skip is not None:
            self._counted.append((sub_group, before, gradients.used))
        runs = with_padding(runs, sub_group)
        self._write_step(sub_group, max(run.step for run in runs))
        rest = None if sub_group.stored is None else sub_group.stored.master.rest
        if rest is None or sub_group.lp_param is None:
            vectors = self._family.vectors(state, group, sub_group.master, reduced, sub_group.lp_param)
        else:
            vectors = replace(self._family.vectors(state, group, sub_group.lp_param, reduced, None), rest=rest)
        for run in runs:
            part = vectors.part(run.start, run.stop - run.start)
            seed = self._seed(sub_group, run) if self.rounds_stochastically else None
            self._family.update(self.optimizer, group, part, run.step, Applied(gradients.scale, gradients.skip, seed))

    @staticmethod
    def _seed(sub_group: SubGroup, run: StepRun) -> int:
        """A seed that differs for every run and step, but is equal on ranks that update the same weights."""
        first = next(piece for piece in sub_group.pieces if piece.in_shard == run.start)
        return zlib.crc32(f"{first.parameter} {first.in_parameter} {run.step}".encode()) & 0x7FFFFFFF
