"""Divides batches of whole sequences among the ranks that share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_zero.comm import Collectives, NativeCollectives

IGNORED = -100
_IS_PART = "_hf_zero_part_of_sequences"
_PADDED_WITH = {"labels": IGNORED, "shift_labels": IGNORED}


class UlyssesSPDataLoaderAdapter:
    """Distributes each rank's batches to all ranks of its group, one after the other, as parts of every sequence.

        rank 0 loads A, rank 1 loads B       both train on A, then on B: rank 0 on the left halves, rank 1 on the right

    Labels become `shift_labels` (shifted left by one, so that a position and its label stay together); missing position
    ids are added, and sequences are padded on the right to a multiple of the ranks. Other attributes are those of the
    loader (`dataset`, `sampler`, `set_epoch`, ...). The arguments are DeepSpeed's.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = device
        self._num_skipped = 0
        self._collectives: Collectives = NativeCollectives(sp_group)

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size - self._num_skipped

    def around(self, dl: Any, skipped: int = 0) -> UlyssesSPDataLoaderAdapter:
        """The same adapter for another loader, without its first `skipped` batches (counted over all ranks)."""
        adapter = type(self)(dl, self.sp_rank, self.sp_group, self.sp_world_size, self.device)
        adapter._num_skipped = skipped
        return adapter

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # not set yet while the adapter is copied
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> Iterator[Any]:
        """Raises RuntimeError on all ranks of the group if the loader of one rank failed."""
        batches, to_skip = iter(self.dl), self._num_skipped
        while True:
            reports: list[Any] = self._collectives.gather_objects(_next(batches))
            ranks = zip(self._collectives.ranks, reports, strict=True)
            failed = [f"rank {rank}: {error}" for rank, (_, error) in ranks if error]
            if failed:
                raise RuntimeError(f"a loader of ranks that share sequences failed: {'; '.join(failed)}")
            loaded = [batch for batch, _ in reports if batch is not None]
            if not loaded:
                return
            for batch in loaded:
                if to_skip:
                    to_skip -= 1
                else:
                    part = part_of(batch, self.sp_rank, self.sp_world_size, self.device)
                    _sequences(part).__dict__[_IS_PART] = True
                    yield part


def _next(batches: Iterator[Any]) -> tuple[Any, str | None]:
    """(next batch in host memory, or None at the end; error)."""
    try:
        batch = next(batches, None)
        return (None if batch is None else _on(batch, torch.device("cpu"))), None
    except Exception as error:  # reported to the other ranks, which would wait for this one
        return None, f"{type(error).__name__}: {error}"


def _on(batch: Mapping[str, Any], device: Any) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}


def part_of(batch: Mapping[str, Any], rank: int, size: int, device: Any = None) -> dict[str, Any]:
    """The `rank`-th of `size` equal parts of every sequence in `batch`.

    Args:
        batch: contains `input_ids` or `inputs_embeds`, [samples, positions, ...]; tensors with the same first two
            dimensions are cut as well, all other values stay whole.
        device: target device; None: do not move tensors.
    """
    batch = dict(batch)
    whole = _sequences(batch)
    shape = whole.shape[:2]
    if batch.get("position_ids") is None:
        batch["position_ids"] = torch.arange(shape[1], device=whole.device).repeat(shape[0], 1)
    labels = batch.get("labels")
    if isinstance(labels, Tensor) and labels.shape == shape:
        shifted = batch.get("shift_labels")
        batch["shift_labels"] = pad(labels[:, 1:], (0, 1), value=IGNORED) if shifted is None else shifted
        del batch["labels"]
    length = -(-shape[1] // size)
    _close_documents(batch, size * length - shape[1])
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.shape[:2] == shape:
            value = _padded(name, value, size * length - shape[1])
            batch[name] = value.narrow(1, rank * length, length).contiguous()
    return batch if device is None else _on(batch, device)


def _sequences(batch: Mapping[str, Any]) -> Tensor:
    sequences = batch.get("input_ids", batch.get("inputs_embeds"))
    if not isinstance(sequences, Tensor) or sequences.dim() < 2:
        raise ValueError(f"sequences are cut along input_ids [samples, positions]; the batch has {sorted(batch)}")
    return sequences


def is_part(sequences: Tensor) -> bool:
    """Whether the adapter created this tensor as a part of sequences."""
    return vars(sequences).get(_IS_PART, False) is True


def _close_documents(batch: dict[str, Any], num: int) -> None:
    """Extend flash attention's document bounds: the `num` positions of padding form a separate document."""
    for name in ("q", "k"):
        bounds, longest = batch.get(f"cu_seq_lens_{name}"), batch.get(f"max_length_{name}")
        if num and isinstance(bounds, Tensor) and bounds.dim() == 1:
            batch[f"cu_seq_lens_{name}"] = torch.cat([bounds, bounds[-1:] + num])
            if longest is not None:
                batch[f"max_length_{name}"] = max(longest, num)


def _padded(name: str, values: Tensor, num: int) -> Tensor:
    """Pad `num` positions on the right, which attention and loss ignore."""
    if not num:
        return values
    if name == "position_ids":  # they continue, so that padding does not look like another document
        more = values[:, -1:] + torch.arange(1, num + 1, device=values.device)
        return torch.cat([values, more], dim=1)
    return pad(values, (0, 0) * (values.dim() - 2) + (0, num), value=_PADDED_WITH.get(name, 0))
