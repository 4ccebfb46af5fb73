"""What ranks tell each other beside tensors of the model: sums of a few numbers, facts of hosts, small objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hf_zero.comm.ledger import ledger
from hf_zero.comm.rows import num_bytes


class ControlMessages(ABC):
    """One group of ranks as far as it decides together. Booked apart from the payload traffic.

    Attributes:
        rank: this one's place in the group.
        size: number of ranks.
        ranks: of the world, in the order of the group.
        num_beside: how many of them are on this rank's host, itself among them.
    """

    def __init__(self, rank: int, size: int, ranks: Sequence[int] | None = None) -> None:
        """`ranks`: default the first `size` ones."""
        self.rank = rank
        self.size = size
        self.ranks = tuple(range(size) if ranks is None else ranks)
        self.num_beside = size

    def sum_small(self, values: Tensor) -> None:
        """Sum a small vector over all ranks, in place; returns when done."""
        with self._booked(num_bytes(values)):
            self._sum_small(values)

    def sum_with_facts(self, values: Tensor, facts: Sequence[float]) -> list[float]:
        """Sum `values` (1-D, fp64, in place) and `facts`, which the hosts know, over all ranks; returns the latter.

        Where `values` lie on an accelerator they are only on their way when this returns: hosts exchange `facts` by
        themselves, and wait for no device.
        """
        size = num_bytes(values) + len(facts) * values.element_size()
        with self._booked(size):
            return self._sum_with_facts(values, facts)

    def _sum_with_facts(self, values: Tensor, facts: Sequence[float]) -> list[float]:
        """All in one message, because all of it is in host memory."""
        message = torch.cat([values, torch.tensor(facts, dtype=values.dtype, device="cpu")])
        self._sum_small(message)
        values.copy_(message[: values.numel()])
        return message[values.numel() :].tolist()

    @abstractmethod
    def gather_objects(self, value: object) -> list[object]:
        """Every rank's `value`, in rank order (small Python objects, set-up only)."""

    @abstractmethod
    def _sum_small(self, values: Tensor) -> None: ...

    @contextmanager
    def _booked(self, size: int) -> Iterator[None]:
        with ledger.phase("control"), ledger.call("all_reduce", size, num_ranks=self.size, num_beside=self.num_beside):
            yield
