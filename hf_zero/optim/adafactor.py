"""Adafactor on shards, for transformers' and torch's own classes, with the row and column means of whole matrices.

    A = squares of g (+ eps)           R, C = running means of A over rows and columns;  vectors: V, of A itself
    u = g / sqrt(R C^T / mean(R))      u = u / max(1, rms(u) / clip)
    p = p * (1 - decay) - rate * u     rate from lr, step and rms(p);  with beta1 the momentum of rate * u instead

A rank owns a part of every matrix, which may start and end in the middle of rows. Two small sums over ranks per step
make the update exact: one of shared rows and columns and of the squared weights, one of the squared updates.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.kernels.vectors import chunks
from hf_zero.layout import Piece
from hf_zero.layout.matrices import Block, MatrixShape, MatrixSlice, blocks, runs_cut
from hf_zero.optim.traits import Sees, Traits
from hf_zero.optim.updater import (
    OF_WHOLE_TENSORS,
    Peers,
    Spread,
    StateSlice,
    StepGradients,
    SubGroup,
    Updater,
    UpdaterRanks,
    WholeStates,
)

# Second moments stored as row and column means (Shazeer & Stern 2018, arXiv 1804.04235), for the part a rank owns.
#
#     R = mean of squares over every row      C = mean over every column      V ~ R C^T / mean(R), and mean(R) = mean(C)
#
# A rank stores R for the rows that its part touches, and C for the matrices. Rows and matrices shared with other ranks
# are summed over ranks: `Table` assigns each of them a place in one message.


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums of squares of a slice, or their running means: `rows` [rows touched], `columns` [matrices touched, columns].

    Attributes:
        of: the slice of elements.
    """

    of: MatrixSlice
    rows: Tensor
    columns: Tensor

    @classmethod
    def zeros(cls, of: MatrixSlice, dtype: torch.dtype, device: torch.device) -> Sums:
        rows = torch.zeros(of.num_rows, dtype=dtype, device=device)
        return cls(of, rows, torch.zeros(of.num_batches, of.matrix.columns, dtype=dtype, device=device))

    def add(self, start: int, squares: Tensor) -> None:
        """Add `squares` (1-D), which start at element `start` of the slice."""
        for block, rows, columns in self._blocks(start, squares.numel()):
            part = squares.narrow(0, block.start, block.numel).view(block.shape)
            rows.add_(part.sum(dim=-1))
            columns.add_(part.sum(dim=1))

    def means(self) -> Sums:
        """The means, from sums of whole rows and columns."""
        return Sums(self.of, self.rows / self.of.matrix.columns, self.columns / self.of.matrix.rows)

    def move_to(self, means: Sums, weight: float) -> None:
        """Update these running means: x = x + weight * (mean - x)."""
        self.rows.lerp_(means.rows, weight)
        self.columns.lerp_(means.columns, weight)

    def shares(self, floor: float | None) -> Sums:
        """Inputs of `precondition`: R / mean(R) and C or, without a floor, the reciprocals of their roots.

        Args:
            floor: minimum of mean(R) and of sqrt(V); None: no minimum.
        """
        of, mean = self.of, self.columns.mean(dim=-1)
        row = torch.arange(of.first_row, of.first_row + of.num_rows, device=self.rows.device)
        mean = (mean if floor is None else mean.clamp(min=floor))[row // of.matrix.rows - of.first_batch]
        rows = self.rows / mean
        # Separate roots: the product under one root would leave the fp32 range if whole rows have no gradient.
        return Sums(of, rows, self.columns) if floor is not None else Sums(of, rows.rsqrt_(), self.columns.rsqrt())

    def precondition(self, start: int, gradient: Tensor, floor: float | None) -> None:
        """gradient / sqrt(V) in place. `self` is `shares(floor)`; `gradient` starts at element `start`."""
        for block, rows, columns in self._blocks(start, gradient.numel()):
            part = gradient.narrow(0, block.start, block.numel).view(block.shape)
            if floor is None:
                part.mul_(rows.unsqueeze(-1)).mul_(columns.unsqueeze(1))
            else:
                variance = rows.unsqueeze(-1) * columns.unsqueeze(1)
                part.mul_(variance.clamp_(min=floor * floor).rsqrt_())

    def _blocks(self, start: int, numel: int) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Yield each block with views of its rows [matrices, rows of each] and columns [matrices, columns]."""
        first = self.of.start + start
        for block in blocks(self.of.matrix, first, first + numel):
            num_batches, num_rows, num_columns = block.shape
            rows = self.rows.narrow(0, block.row - self.of.first_row, block.num_rows).view(num_batches, num_rows)
            columns = self.columns.narrow(0, block.batch - self.of.first_batch, num_batches)
            yield block, rows, columns.narrow(1, block.column, num_columns)


class Table:
    """Places in a message (1-D) for values that ranks share: split rows and matrices, and one number per parameter.

    The same on all ranks. Most rows are in one rank's part and are not sent.
    """

    def __init__(self, spread: Sequence[Spread]) -> None:
        self.num_parameters = len(spread)
        self.numel = len(spread)
        self._rows: dict[int, dict[int, int]] = {}
        self._columns: dict[int, dict[int, int]] = {}
        for index, one in enumerate(spread):
            matrix = MatrixShape.of(one.shape)
            if matrix is not None and one.cuts:
                self._rows[index] = self._places(runs_cut(one.cuts, matrix.columns), 1)
                self._columns[index] = self._places(runs_cut(one.cuts, matrix.matrix_numel), matrix.columns)

    def _places(self, runs: Sequence[int], length: int) -> dict[int, int]:
        places = {run: self.numel + position * length for position, run in enumerate(runs)}
        self.numel += len(runs) * length
        return places

    def write(self, message: Tensor, parameter: int, sums: Sums) -> None:
        """Write this rank's sums of shared rows and columns into `message`."""
        for place, values in self._shared(parameter, sums):
            message.narrow(0, place, values.numel()).copy_(values)

    def read(self, message: Tensor, parameter: int, sums: Sums) -> None:
        """Read the sums over all ranks from `message`."""
        for place, values in self._shared(parameter, sums):
            values.copy_(message.narrow(0, place, values.numel()))

    def _shared(self, parameter: int, sums: Sums) -> Iterator[tuple[int, Tensor]]:
        of = sums.of
        rows = _ends(self._rows.get(parameter, {}), of.first_row, of.num_rows)
        columns = _ends(self._columns.get(parameter, {}), of.first_batch, of.num_batches)
        for place, position in rows:
            yield place, sums.rows.narrow(0, position, 1)
        for place, position in columns:
            yield place, sums.columns[position]


def _ends(places: Mapping[int, int], first: int, count: int) -> list[tuple[int, int]]:
    """(place, position in the slice) of its first and last run if shared; runs in between never are."""
    return [(places[first + position], position) for position in sorted({0, count - 1}) if first + position in places]


# Adafactor in transformers and torch: the names of their states, and the coefficients of one update.


@dataclass(frozen=True, slots=True)
class AdafactorRule:
    """Coefficients of one update of one parameter.

    Attributes:
        weight: weight of the new squares in the running means.
        added: added to every square.
        floor: see `Sums.shares`; vectors: smallest sqrt(V).
        sign: 1, or -1 to maximise.
        decay, rate: see the module's formulas; 0-dim, on the device, if they depend on the weights.
        beta1: None without momentum.
    """

    weight: float
    added: float
    floor: float | None
    sign: float
    clip: float
    decay: Tensor | float
    rate: Tensor
    beta1: float | None = None


class Flavour(ABC):
    """The differences between the two implementations. Stateless.

    Attributes:
        rows, columns, vector: their names for R, C and V.
        keeps_dims: whether R and C keep the reduced dimension.
    """

    rows: str
    columns: str
    vector: str
    keeps_dims = False

    @abstractmethod
    def rule(self, group: Mapping[str, Any], step: int, rms: Tensor) -> AdafactorRule:
        """The coefficients of update `step` of a parameter whose weights have the root mean square `rms` (0-dim)."""

    @abstractmethod
    def single_values(self, step: int, rms: Tensor) -> dict[str, Any]:
        """The class's states that are not tensors."""

    def has_momentum(self, group: Mapping[str, Any]) -> bool:
        return group.get("beta1") is not None

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Shapes of a parameter's states, without momentum."""
        if len(shape) < 2:
            return {self.vector: shape}
        kept = (1,) if self.keeps_dims else ()
        return {self.rows: (*shape[:-1], *kept), self.columns: (*shape[:-2], *kept, shape[-1])}


class TransformersFlavour(Flavour):
    """`transformers.optimization.Adafactor`."""

    rows, columns, vector = "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq"

    def rule(self, group: Mapping[str, Any], step: int, rms: Tensor) -> AdafactorRule:
        rate = group["lr"]
        if group["relative_step"]:
            rate = min(1e-6 * step if group["warmup_init"] else 1e-2, 1.0 / math.sqrt(step))
        if rate is None:
            raise ValueError("Adafactor(lr=None, relative_step=False) has no learning rate: set lr")
        scaled = float(rate) * (rms.clamp(min=group["eps"][1]) if group["scale_parameter"] else torch.ones_like(rms))
        return AdafactorRule(
            weight=math.pow(step, group["decay_rate"]),
            added=group["eps"][0],
            floor=None,
            sign=1.0,
            clip=group["clip_threshold"],
            decay=group["weight_decay"] * scaled if group["weight_decay"] else 0.0,
            rate=scaled,
            beta1=group["beta1"],
        )

    def single_values(self, step: int, rms: Tensor) -> dict[str, Any]:
        return {"step": step, "RMS": rms}


class TorchFlavour(Flavour):
    """`torch.optim.Adafactor`."""

    rows, columns, vector = "row_var", "col_var", "variance"
    keeps_dims = True

    def rule(self, group: Mapping[str, Any], step: int, rms: Tensor) -> AdafactorRule:
        (floor, smallest), lr = group["eps"], float(group["lr"])
        return AdafactorRule(
            weight=float(step) ** group["beta2_decay"],
            added=0.0,
            floor=torch.finfo(rms.dtype).eps if floor is None else floor,
            sign=-1.0 if group["maximize"] else 1.0,
            clip=group["d"],
            decay=lr * group["weight_decay"],
            rate=rms.clamp(min=smallest) * min(lr, 1 / math.sqrt(step)),
        )

    def single_values(self, step: int, rms: Tensor) -> dict[str, Any]:
        return {"step": torch.tensor(float(step))}


def flavour_of(optimizer: torch.optim.Optimizer) -> Flavour | None:
    """The implementation of this optimizer. Exact classes only: a subclass may behave differently."""
    theirs = getattr(sys.modules.get("transformers.optimization"), "Adafactor", None)
    if type(optimizer) is theirs:
        return TransformersFlavour()
    return TorchFlavour() if type(optimizer) is getattr(torch.optim, "Adafactor", None) else None


@dataclass(slots=True)
class _Part:
    """This rank's part of one parameter, with its states.

    Attributes:
        factors: R and C of a matrix, as means.
        vector: V of this part of a vector.
        rms: root mean square of the whole parameter before the last update.
        sums: sums of squares, between the passes of a step.
        rule: coefficients of the current step.
    """

    sub_group: SubGroup
    piece: Piece
    shape: tuple[int, ...]
    step: int
    rms: Tensor
    factors: Sums | None = None
    vector: Tensor | None = None
    sums: Sums | None = None
    rule: AdafactorRule | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def tensors(self, names: Flavour) -> dict[str, tuple[Tensor, int]]:
        """The part's tensors under the flavour's names, each with the place of its first element in the whole state."""
        if self.factors is None:
            assert self.vector is not None
            return {names.vector: (self.vector, self.piece.in_parameter)}
        of = self.factors.of
        rows, columns = (self.factors.rows, of.first_row), (self.factors.columns, of.first_batch * of.matrix.columns)
        return {names.rows: rows, names.columns: columns}

    def own(self, names: Flavour) -> dict[str, Any]:
        """Step, rms, and the part's tensors under the flavour's names."""
        tensors = {name: tensor for name, (tensor, _) in self.tensors(names).items()}
        return {"step": self.step, "RMS": self.rms, **tensors}

    def adopt(self, own: Mapping[str, Any], names: Flavour) -> None:
        """The reverse of `own`, on the same layout."""
        self.step, self.rms = int(own["step"]), own["RMS"].to(self.rms)
        for name, (tensor, _) in self.tensors(names).items():
            tensor.copy_(own[name])

    def slices(self, names: Flavour) -> dict[str, Any]:
        """The parameter's states that this rank saves: rows and matrices that start in its part."""
        shapes = names.shapes(self.shape)
        states = names.single_values(self.step, self.rms)
        if self.vector is not None:
            return {**states, names.vector: StateSlice(shapes[names.vector], self.piece.in_parameter, self.vector)}
        assert self.factors is not None
        of = self.factors.of
        first, end = of.begun(of.matrix.columns)
        rows = self.factors.rows[first - of.first_row : end - of.first_row]
        first_batch, end_batch = of.begun(of.matrix.matrix_numel)
        columns = self.factors.columns[first_batch - of.first_batch : end_batch - of.first_batch].reshape(-1)
        return {
            **states,
            names.rows: StateSlice(shapes[names.rows], first, rows),
            names.columns: StateSlice(shapes[names.columns], first_batch * of.matrix.columns, columns),
        }


class AdafactorUpdater(Updater):
    """Adafactor on flat shards in three passes, with two small sums over ranks between them."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup], flavour: Flavour, peers: Peers
    ) -> None:
        super().__init__(optimizer, sub_groups)
        self._flavour = flavour
        self._peers = peers
        self._spread = peers.spread()
        self._table = Table(self._spread)
        self._parts: dict[int, _Part] = {}
        self._dtype = torch.float32
        for sub_group in sub_groups:
            self._dtype = torch.promote_types(self._dtype, sub_group.master.dtype)
        placed = [(sub_group, piece) for sub_group in sub_groups for piece in sub_group.pieces]
        self._place = {piece.parameter: (sub_group, piece) for sub_group, piece in placed}
        assert len(self._place) == len(placed), "a parameter is in two sub-groups of one rank"

    # Queries

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("exp_avg",) if self._flavour.has_momentum(group) else ()

    def whole_state_names(self) -> tuple[str, ...]:
        return self._flavour.rows, self._flavour.columns, self._flavour.vector

    def collect_state(self) -> None:
        self._follow_resets()

    def parameter_steps(self) -> dict[int, int]:
        return {index: part.step for index, part in self._parts.items()}

    def whole_parameters(self) -> Set[int]:
        return self._place.keys()

    def state_replaced(self) -> None:
        """Load states of whole tensors from the optimizer's state, if present."""
        self._parts = {}
        for sub_group in self.sub_groups:
            state: Mapping[str, Any] = self.optimizer.state.get(sub_group.tensors[0].parameter, {})
            for index, own in state.get(OF_WHOLE_TENSORS, {}).items():
                self._part(index).adopt(own, self._flavour)

    def moved(self, sub_group: SubGroup) -> None:
        state: Mapping[str, Any] = self.optimizer.state.get(sub_group.tensors[0].parameter, {})
        for index, own in state.get(OF_WHOLE_TENSORS, {}).items():
            del self._parts[index]
            self._part(index).adopt(own, self._flavour)
        self._show()

    def whole_states(self) -> WholeStates:
        return {index: part.slices(self._flavour) for index, part in self._parts.items() if part.step}

    def restore_whole_states(self, states: WholeStates) -> None:
        self._parts = {}
        for sub_group in self.sub_groups:
            with self.stager.opened(sub_group, changes=True):
                for piece in sub_group.pieces:
                    if piece.parameter in states:
                        self._restore(piece.parameter, states[piece.parameter])
        self._show()

    # The step

    @torch.no_grad()
    def step(self, gradients: StepGradients) -> Iterator[SubGroup]:
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if not gradients.used:
            return
        self._follow_resets()
        message = torch.zeros(self._table.numel, dtype=self._dtype, device=self.sub_groups[0].master.device)
        for batch in self.stager.batches(gradients.wanted):
            for sub_group in batch:
                for part in self._used(sub_group, gradients):
                    self._measure(part, gradients, message)
        self._peers.add_up(message)
        updates = torch.zeros(self._table.num_parameters, dtype=self._dtype, device=message.device)
        for batch in self.stager.batches(gradients.wanted):
            for sub_group in batch:
                for part in self._used(sub_group, gradients):
                    self._learn(part, message)
                    updates[part.piece.parameter] = self._squared_update(part, gradients).to(message.device)
        self._peers.add_up(updates)
        yield from self.stager.each(gradients.wanted, lambda sub_group: self._apply(sub_group, updates, gradients))
        self._show()

    def _used(self, sub_group: SubGroup, gradients: StepGradients) -> list[_Part]:
        return [self._part(piece.parameter) for piece in sub_group.pieces if piece.parameter in gradients.used]

    def _part(self, parameter: int) -> _Part:
        """The part of a parameter, initially with zero states."""
        if parameter not in self._parts:
            sub_group, piece = self._place[parameter]
            device, shape = sub_group.master.device, self._spread[parameter].shape
            part = _Part(sub_group, piece, shape, step=0, rms=torch.zeros((), dtype=self._dtype, device=device))
            of = _slice_of(part)
            if of is not None:
                part.factors = Sums.zeros(of, self._dtype, device)
            else:
                part.vector = torch.zeros(piece.numel, dtype=self._dtype, device=device)
            self._parts[parameter] = part
        return self._parts[parameter]

    def _measure(self, part: _Part, gradients: StepGradients, message: Tensor) -> None:
        """First pass: squared weights, and sums of squared gradients over rows and columns."""
        sub_group, piece, of = part.sub_group, part.piece, _slice_of(part)
        weight = sub_group.master.narrow(0, piece.in_shard, piece.numel)
        squares = torch.zeros((), dtype=self._dtype, device=weight.device)
        part.sums = None if of is None else Sums.zeros(of, self._dtype, weight.device)
        for start, count in chunks(piece.numel, weight.device):
            chunk = weight.narrow(0, start, count).to(self._dtype)
            squares += torch.dot(chunk, chunk)
            if part.sums is not None:
                part.sums.add(start, self._gradient(part, gradients, start, count).square_())
        message[piece.parameter] = squares.to(message.device)
        if part.sums is not None:
            self._table.write(message, piece.parameter, part.sums)

    def _learn(self, part: _Part, message: Tensor) -> None:
        """With the sums over all ranks, compute the coefficients of this update, and update R and C."""
        part.step += 1
        part.rms = (message[part.piece.parameter] / part.numel).sqrt().to(part.rms.device)
        group = self.optimizer.param_groups[part.sub_group.group]
        part.rule = rule = self._flavour.rule(group, part.step, part.rms)
        if part.sums is not None:
            assert part.factors is not None
            self._table.read(message, part.piece.parameter, part.sums)
            means = part.sums.means()
            part.factors.move_to(Sums(means.of, means.rows + rule.added, means.columns + rule.added), rule.weight)
            part.sums = None

    def _squared_update(self, part: _Part, gradients: StepGradients) -> Tensor:
        """Second pass: the sum of squares of u; also updates V of vectors."""
        assert part.rule is not None
        total = torch.zeros_like(part.rms)
        if part.vector is not None:
            for start, count in chunks(part.piece.numel, part.vector.device):
                squares = self._gradient(part, gradients, start, count).square_().add_(part.rule.added)
                part.vector.narrow(0, start, count).lerp_(squares, part.rule.weight)
        for _, update in self._updates(part, gradients):
            total += torch.dot(update, update)
        return total

    def _updates(self, part: _Part, gradients: StepGradients) -> Iterator[tuple[int, Tensor]]:
        """Yield (first element, u) chunk by chunk, before clipping."""
        assert part.rule is not None
        floor = part.rule.floor
        shares = None if part.factors is None else part.factors.shares(floor)
        for start, count in chunks(part.piece.numel, part.rms.device):
            update = self._gradient(part, gradients, start, count)
            if shares is not None:
                shares.precondition(start, update, floor)
            else:
                assert part.vector is not None
                squares = part.vector.narrow(0, start, count)
                update.mul_((squares if floor is None else squares.clamp(min=floor * floor)).rsqrt())
            yield start, update

    def _gradient(self, part: _Part, gradients: StepGradients, start: int, count: int) -> Tensor:
        """A chunk of the gradient as a new tensor."""
        reduced = gradients.of(part.sub_group).narrow(0, part.piece.in_shard + start, count)
        sign = 1.0 if part.rule is None else part.rule.sign
        return reduced.to(self._dtype, copy=True).mul_(gradients.scale * sign)

    def _apply(self, sub_group: SubGroup, updates: Tensor, gradients: StepGradients) -> None:
        """Third pass: p = p * (1 - decay) - rate * u, and the rounded weights."""
        group = self.optimizer.param_groups[sub_group.group]
        momentum = self._momentum(sub_group) if self._flavour.has_momentum(group) else None
        for part in self._used(sub_group, gradients):
            piece, rule = part.piece, part.rule
            assert rule is not None
            rms = (updates[piece.parameter].to(part.rms.device) / part.numel).sqrt()
            factor = rule.rate / (rms / rule.clip).clamp(min=1.0)
            for start, update in self._updates(part, gradients):
                at = piece.in_shard + start
                update.mul_(factor)
                if momentum is not None and rule.beta1 is not None:
                    moment = momentum.narrow(0, at, update.numel())
                    update = moment.mul_(rule.beta1).add_(update, alpha=1 - rule.beta1)
                weight = sub_group.master.narrow(0, at, update.numel())
                weight.copy_(weight * (1 - rule.decay) - update)
                if sub_group.lp_param is not None:
                    sub_group.lp_param.narrow(0, at, update.numel()).copy_(weight)
            part.rule = None

    def _momentum(self, sub_group: SubGroup) -> Tensor:
        state: dict[str, Any] = self.optimizer.state[sub_group.tensors[0].parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(sub_group.master, dtype=self._dtype)
        momentum: Tensor = state["exp_avg"]
        return momentum.view(-1)

    # States of whole tensors

    def _follow_resets(self) -> None:
        """Follow a program that has removed states from the optimizer's state, or changed a step there."""
        for index, part in list(self._parts.items()):
            state: Mapping[str, Any] = self.optimizer.state.get(part.sub_group.tensors[0].parameter, {})
            if index not in state.get(OF_WHOLE_TENSORS, {}):
                del self._parts[index]
            elif int(state["step"]) != max(own["step"] for own in state[OF_WHOLE_TENSORS].values()):
                part.step = int(state["step"])

    def set_steps(self, parameter: int, steps: int) -> None:
        if parameter in self._parts:
            self._parts[parameter].step = steps
            self._show()

    def _show(self) -> None:
        """Store everything in the optimizer's state, so that `state_dict` includes it."""
        for sub_group in self.sub_groups:
            mine = {p: part.own(self._flavour) for p, part in self._parts.items() if part.sub_group is sub_group}
            state: dict[str, Any] = self.optimizer.state[sub_group.tensors[0].parameter]
            if mine:
                # torch's class expects a step in every state.
                state["step"] = torch.tensor(float(max(self._parts[parameter].step for parameter in mine)))
                state[OF_WHOLE_TENSORS] = mine
            else:
                state.pop(OF_WHOLE_TENSORS, None)

    def _restore(self, parameter: int, saved: Mapping[str, Any]) -> None:
        part = self._part(parameter)
        for kind, shape in self._flavour.shapes(part.shape).items():
            value, name = saved.get(kind), type(self.optimizer).__name__
            have = tuple(value.shape) if isinstance(value, Tensor) else "no tensor"
            if have != shape:
                raise ValueError(
                    f"{name}'s state {kind!r} of a parameter of shape {part.shape} has {have}, not {shape}"
                )
        part.step = int(saved.get("step", 0))
        part.rms.copy_(torch.as_tensor(saved.get("RMS", 0.0)))
        for name, (tensor, start) in part.tensors(self._flavour).items():
            tensor.copy_(saved[name].reshape(-1).narrow(0, start, tensor.numel()).view(tensor.shape))
        if isinstance(saved.get("exp_avg"), Tensor):  # saved by an optimizer on whole tensors
            sub_group, piece = part.sub_group, part.piece
            values = saved["exp_avg"].reshape(-1).narrow(0, piece.in_parameter, piece.numel)
            self._momentum(sub_group).narrow(0, piece.in_shard, piece.numel).copy_(values)


def _slice_of(part: _Part) -> MatrixSlice | None:
    matrix, start = MatrixShape.of(part.shape), part.piece.in_parameter
    return None if matrix is None else MatrixSlice(matrix, start, start + part.piece.numel)


def adafactor_traits(optimizer: torch.optim.Optimizer) -> Traits | None:
    """Traits of transformers' and torch's own classes; None for others of this name."""
    flavour = flavour_of(optimizer)
    if flavour is None:
        return None

    def make(sub_groups: Sequence[SubGroup], peers: Peers | None, ranks: UpdaterRanks | None) -> Updater:
        assert peers is not None, "with whole tensors Adafactor runs its own step"
        return AdafactorUpdater(optimizer, sub_groups, flavour, peers)

    return Traits(Sees.SHARDS_AND_PEERS, make, serves_whole_buckets=False)
