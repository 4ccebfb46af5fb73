"""Common code of the 1-bit optimizers: a warm-up counted in updates, then momentum sent at one bit per element.

During warm-up they are ordinary optimizers with reduced gradients. Afterwards, ranks no longer reduce gradients: each
adds its own gradient to the momentum, and `CompressedMean` averages the momentum at one bit per element, with the
compression error fed back into the next call:

    worker   y = x + error        sends s * sign(y), one s per tensor            error = y - s * sign(y)
    server   z = mean over ranks of s * sign(y) + error       (rank j serves the j-th of `world` equal chunks)
             sends s' * sign(z), one s' per tensor in the chunk                 error = z - s' * sign(z)
    all      use s' * sign(z) of every chunk

Each element costs two bits: one to the server, and one back. Source: Tang et al. 2021 (arXiv 2102.02888).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.comm.collectives import Collectives, own_shard
from hf_zero.config.extras import optimizer_type
from hf_zero.kernels.frozen_adam import frozen_adam
from hf_zero.kernels.signs import PER_BYTE, pack_signs_with_error, unpack_signs
from hf_zero.kernels.vectors import Vectors, fp32_chunks
from hf_zero.layout import Bucket, Interval, Slot
from hf_zero.layout.buckets import round_up
from hf_zero.optim.elementwise import StepCounts, check_rates, refuse_amsgrad, state_of, with_padding
from hf_zero.optim.traits import Sees, Traits
from hf_zero.optim.updater import Peers, StepGradients, SubGroup, Updater, UpdaterRanks

_ALIGN_BYTES = 8


@dataclass(frozen=True, slots=True)
class _ChunkPiece:
    """A tensor's part of one chunk: elements [start, stop) of the flat tensor, of which `numel` are not padding."""

    tensor: int
    start: int
    stop: int
    numel: int


class CompressedMean:
    """Averages a flat tensor that holds several tensors, with compression and error feedback. Calls are collective.

    Attributes:
        worker_error: 1-D, with the length of the flat tensor: accumulated compression error of this rank.
        server_error: 1-D, for this rank's chunk: accumulated compression error of this rank as a server.
    """

    def __init__(self, collectives: Collectives, flat: Tensor, tensors: Sequence[Interval]) -> None:
        """
        Args:
            flat: 1-D; only its length, dtype and device are used. The length must be a multiple of 8 * world.
            tensors: intervals of the tensors, in order; each starts at a multiple of 8.
        """
        assert flat.numel() % (PER_BYTE * collectives.size) == 0
        assert all(tensor.start % PER_BYTE == 0 for tensor in tensors)
        self._collectives = collectives
        self._chunk = flat.numel() // collectives.size
        self._whole = [_ChunkPiece(i, t.start, round_up(t.stop, PER_BYTE), t.numel) for i, t in enumerate(tensors)]
        self._pieces = [list(self._pieces_of(rank)) for rank in range(collectives.size)]
        self._head = round_up(max(map(len, self._pieces)) * flat.element_size(), _ALIGN_BYTES)
        self.worker_error = torch.zeros_like(flat)
        self.server_error = flat.new_zeros(self._chunk)

    @torch.no_grad()
    def average(self, flat: Tensor, tensors: Collection[int]) -> None:
        """Replace these tensors in `flat` by their compressed mean, the same on all ranks; others are unchanged."""
        received = self._send_to_servers(flat, tensors)
        row = self._serve(received, tensors)
        rows = self._collectives.gather_rows(row, row.new_empty)
        rows.wait()
        for rank, pieces in enumerate(self._pieces):
            scales, signs = self._open(rows.row(rank), rank, flat.dtype)
            for position, piece in enumerate(pieces):
                if piece.tensor in tensors:
                    target = flat.narrow(0, piece.start, piece.stop - piece.start)
                    unpack_signs(self._part(signs, piece, rank), scales[position], target)
                    target.narrow(0, piece.numel, target.numel() - piece.numel).zero_()
        rows.give_back()

    @torch.no_grad()
    def error_feedback(self) -> Tensor:
        """The accumulated error of the mean: 1-D, for the whole flat tensor, the same on all ranks. Collective.

        Using it as `worker_error` on all ranks, with a `server_error` of zero, preserves the total error.
        """
        total = self.worker_error / self._collectives.size
        own_shard(total, self._collectives.rank, self._collectives.size).add_(self.server_error)
        self._collectives.all_reduce(total).wait()
        return total

    def forget(self) -> None:
        """Reset the errors to zero."""
        self.worker_error.zero_()
        self.server_error.zero_()

    def _send_to_servers(self, flat: Tensor, tensors: Collection[int]) -> list[Tensor]:
        signs = torch.zeros(flat.numel() // PER_BYTE, dtype=torch.uint8, device=flat.device)
        scales = flat.new_zeros(len(self._whole))
        for piece in self._whole:
            if piece.tensor in tensors:
                length = piece.stop - piece.start
                error = self.worker_error.narrow(0, piece.start, length).add_(flat.narrow(0, piece.start, length))
                packed = signs.narrow(0, piece.start // PER_BYTE, length // PER_BYTE)
                scales[piece.tensor] = pack_signs_with_error(error, packed, piece.numel)
        sent = [self._row(flat) for _ in self._pieces]
        for rank, (row, pieces) in enumerate(zip(sent, self._pieces, strict=True)):
            head, body = self._open(row, rank, flat.dtype)
            if pieces:
                head.copy_(scales.narrow(0, pieces[0].tensor, len(pieces)))
            body.copy_(own_shard(signs, rank, self._collectives.size))
        received = [torch.empty_like(row) for row in sent]
        self._collectives.all_to_all(received, sent)
        return received

    def _serve(self, received: Sequence[Tensor], tensors: Collection[int]) -> Tensor:
        rank, world = self._collectives.rank, self._collectives.size
        row = self._row(self.server_error)
        scales, signs = self._open(row, rank, self.server_error.dtype)
        opened = [self._open(theirs, rank, self.server_error.dtype) for theirs in received]
        for position, piece in enumerate(self._pieces[rank]):
            if piece.tensor not in tensors:
                continue
            error = self.server_error.narrow(0, piece.start - rank * self._chunk, piece.stop - piece.start)
            for their_scales, their_signs in opened:
                unpack_signs(self._part(their_signs, piece, rank), their_scales[position] / world, error, add=True)
            error.narrow(0, piece.numel, error.numel() - piece.numel).zero_()
            scales[position] = pack_signs_with_error(error, self._part(signs, piece, rank), piece.numel)
        return row

    def _row(self, like: Tensor) -> Tensor:
        """A message: scales of the tensors in a chunk, then its packed signs."""
        length = round_up(self._head + self._chunk // PER_BYTE, _ALIGN_BYTES)
        return torch.zeros(length, dtype=torch.uint8, device=like.device)

    def _open(self, row: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(scales, signs) of a message about the chunk of `rank`, as views."""
        scales = row.narrow(0, 0, len(self._pieces[rank]) * dtype.itemsize).view(dtype)
        return scales, row.narrow(0, self._head, self._chunk // PER_BYTE)

    def _part(self, signs: Tensor, piece: _ChunkPiece, rank: int) -> Tensor:
        start = piece.start - rank * self._chunk
        return signs.narrow(0, start // PER_BYTE, (piece.stop - piece.start) // PER_BYTE)

    def _pieces_of(self, rank: int) -> Iterator[_ChunkPiece]:
        low, high = rank * self._chunk, (rank + 1) * self._chunk
        for whole in self._whole:
            start, stop = max(low, whole.start), min(high, whole.stop)
            if start < stop:
                end = min(whole.start + whole.numel, high)
                yield _ChunkPiece(whole.tensor, start, stop, max(0, end - start))


MOMENT, VARIANCE, ERROR_FEEDBACK = "exp_avg", "exp_avg_sq", "error_feedback"
UPDATES = "num_updates"
_UNUSED_KEYS = ("exp_avg_mask", "non_freeze")


class CompressingOptimizer(torch.optim.Optimizer):
    """Base class of the 1-bit optimizers. They need the engine, which provides unreduced gradients.

    The number of updates is stored in every group, so that checkpoints contain it.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        eps_inside_sqrt: bool = False,
        bias_correction: bool = False,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        """`cuda_aware` and `comm_backend_name` are accepted for compatibility with DeepSpeed, without effect."""
        name = type(self).__name__
        refuse_amsgrad(name, amsgrad)
        if eps_inside_sqrt or bias_correction:
            option = "eps_inside_sqrt" if eps_inside_sqrt else "bias_correction"
            raise ValueError(f"{name}({option}=True): the published algorithm does not use it; leave it out")
        if max_grad_norm:
            raise ValueError(f"{name}(max_grad_norm={max_grad_norm}): set gradient_clipping in ds.json instead")
        rates = {key: defaults[key] for key in ("lr", "eps", "weight_decay")}
        check_rates(name, defaults["betas"], **rates)
        super().__init__(params, {**defaults, "betas": tuple(defaults["betas"]), UPDATES: 0})
        for group in self.param_groups:
            for key in _UNUSED_KEYS:
                if key in group:
                    raise ValueError(f"{name}: a group with {key!r} is not supported; leave it out")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        raise RuntimeError(
            f"{type(self).__name__} only runs within the engine: pass it to initialize(), or set it in the config"
        )


class CompressingUpdater(Updater):
    """Updates shards with a 1-bit optimizer. With one rank, nothing is compressed."""

    may_take_local = True
    stays = "keeps the momentum of all ranks on the device, so there would be little to offload"

    def __init__(self, optimizer: torch.optim.Optimizer, sub_groups: Sequence[SubGroup], ranks: UpdaterRanks) -> None:
        super().__init__(optimizer, sub_groups)
        self.ranks = ranks
        self._means: dict[SubGroup, CompressedMean] = {}
        self._moments: dict[SubGroup, Tensor] = {}

    @property
    def num_updates(self) -> int:
        """Number of updates so far, the same on all ranks."""
        return int(self.optimizer.param_groups[0][UPDATES])

    @property
    def compresses(self) -> bool:
        return self.ranks.collectives.size > 1

    def state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (MOMENT, VARIANCE, ERROR_FEEDBACK)

    def state_replaced(self) -> None:
        self._means.clear()
        self._moments.clear()

    @torch.no_grad()
    def collect_state(self) -> None:
        for sub_group in self.sub_groups:
            if sub_group in self._means:
                error = self.own_part(sub_group, self._means[sub_group].error_feedback())
                self.state_of(sub_group)[ERROR_FEEDBACK] = error

    @torch.no_grad()
    def step(self, gradients: StepGradients) -> Iterator[SubGroup]:
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group[UPDATES] += 1
        for sub_group in self.update_all(gradients):
            self.state_of(sub_group)["step"] += 1
            yield sub_group

    @abstractmethod
    def update_all(self, gradients: StepGradients) -> Iterator[SubGroup]:
        """Perform update number `num_updates` of all sub-groups; yields each sub-group when it is done."""

    def state_of(self, sub_group: SubGroup) -> dict[str, Any]:
        """The sub-group's state, created at its first update."""
        return state_of(self.optimizer, sub_group.tensors[0].parameter, (MOMENT, VARIANCE))

    def bucket(self, sub_group: SubGroup) -> Bucket:
        return self.ranks.buckets[sub_group.bucket]

    def slots(self, sub_group: SubGroup, gradients: StepGradients) -> list[Slot]:
        """The slots, in the whole bucket, of the tensors that this step updates."""
        return [slot for slot in self.bucket(sub_group).slots if slot.parameter in gradients.used]

    def runs(self, sub_group: SubGroup, gradients: StepGradients) -> list[Interval]:
        """Maximal intervals of the sub-group to update, including padding."""
        runs = StepCounts().advance(sub_group.pieces, gradients.used)
        return [Interval(run.start, run.stop) for run in with_padding(runs, sub_group)]

    def vectors(self, sub_group: SubGroup, gradient: Tensor, states: Sequence[str]) -> Vectors:
        state = self.state_of(sub_group)
        return Vectors(sub_group.master, gradient, tuple(state[name].view(-1) for name in states), sub_group.lp_param)

    def moment(self, sub_group: SubGroup) -> Tensor:
        """The momentum of the whole bucket, which every rank needs once compression begins."""
        if sub_group not in self._moments:
            state = self.state_of(sub_group)
            whole = self.gather(state[MOMENT].view(-1))
            state[MOMENT] = self.own_part(sub_group, whole)  # a view, so that one update changes both
            self._moments[sub_group] = whole
        return self._moments[sub_group]

    def add_own_gradient(self, sub_group: SubGroup, gradient: Tensor, gradients: StepGradients) -> None:
        """m = beta1 * m + (1 - beta1) * g for the tensors of this step, with this rank's gradient."""
        beta1 = self.optimizer.param_groups[sub_group.group]["betas"][0]
        slots = self.slots(sub_group, gradients)
        blend(self.moment(sub_group), gradient, slots, 1 - beta1, gradients.scale)

    def move(self, sub_group: SubGroup, gradients: StepGradients) -> None:
        """Update the weights by the momentum, with a fixed variance."""
        group = self.optimizer.param_groups[sub_group.group]
        vectors = self.vectors(sub_group, self.state_of(sub_group)[MOMENT].view(-1), (VARIANCE,))
        for run in self.runs(sub_group, gradients):
            frozen_adam(vectors.part(run.start, run.numel), float(group["lr"]), group["eps"], group["weight_decay"])

    def own_part(self, sub_group: SubGroup, whole: Tensor) -> Tensor:
        """The sub-group's interval of the whole bucket."""
        bucket = self.bucket(sub_group)
        owned = bucket.shard(self.ranks.collectives.rank) if self.ranks.is_sharded else Interval(0, bucket.numel)
        return whole.narrow(0, owned.start, owned.numel)

    def gather(self, own: Tensor) -> Tensor:
        """Gather the whole bucket from all ranks' parts; returns `own` if the bucket is not sharded."""
        collectives = self.ranks.collectives
        if not self.ranks.is_sharded:
            return own
        whole = own.new_empty(own.numel() * collectives.size)
        own_shard(whole, collectives.rank, collectives.size).copy_(own)
        collectives.all_gather(whole).wait()
        return whole

    def average(self, sub_group: SubGroup, flat: Tensor, slots: Sequence[Slot]) -> None:
        """Replace these tensors of `flat`, a whole bucket, by their compressed mean over ranks."""
        if not self.compresses:
            return
        own, state = self.bucket(sub_group).slots, self.state_of(sub_group)
        error = state.pop(ERROR_FEEDBACK, None)
        if sub_group not in self._means:
            mean = CompressedMean(self.ranks.collectives, flat, [slot.interval for slot in own])
            if error is not None:
                mean.worker_error.copy_(self.gather(error.view(-1)))
            self._means[sub_group] = mean
        positions = {slot.parameter: position for position, slot in enumerate(own)}
        self._means[sub_group].average(flat, {positions[slot.parameter] for slot in slots})

    def reset_error_feedback(self) -> None:
        self._means.clear()
        for sub_group in self.sub_groups:
            self.state_of(sub_group).pop(ERROR_FEEDBACK, None)


def averaging(optimizer: CompressingOptimizer, updater: type[CompressingUpdater]) -> Traits:
    """The traits of an optimizer that averages full gradients itself, which limits the stage."""

    def make(sub_groups: Sequence[SubGroup], peers: Peers | None, ranks: UpdaterRanks | None) -> Updater:
        assert ranks is not None, "averaging needs the ranks"
        return updater(optimizer, sub_groups, ranks)

    kind = optimizer_type(type(optimizer).__name__)
    assert kind is not None, "declared by this extra"
    return Traits(Sees.BUCKETS, make, highest_stage=kind.highest_stage)


def blend(moment: Tensor, gradient: Tensor, slots: Sequence[Slot], rest: float, scale: Tensor | float) -> None:
    """m = m + rest * (scale * gradient - m) for these tensors of two buckets."""
    for slot in slots:
        part = Vectors(moment, gradient).part(slot.offset, slot.numel)
        for chunk in fp32_chunks(part, scale):
            chunk.weight.lerp_(chunk.gradient, rest)
