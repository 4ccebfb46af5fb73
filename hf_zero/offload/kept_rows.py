"""With hpZ a rank keeps rows of other ranks, too: which, and how it gets what those have updated.

four ranks, two groups      rank 0   1   2   3
    its own row                  0   1   2   3
    kept                        0 2 1 3 0 2 1 3
    gathered                    among ranks 0 and 1, and among 2 and 3
    after an update             row 0 goes from rank 0 to rank 2, row 2 the other way; and 1 and 3 alike
"""

from __future__ import annotations

import torch

from hf_zero.comm import Collectives, Pending
from hf_zero.layout import RowLayout
from hf_zero.layout.units import KeptRows
from hf_zero.offload.vector import Vector


def kept_rows(world: int, rank: int, across: Collectives) -> KeptRows:
    """Of shard number `rank` among `world`, where the ranks of `across` keep the same rows."""
    group = world // across.size
    return KeptRows(group=group, place=rank % group, own=across.rank, count=across.size)


class Renewal(Pending):
    """Updated parts of rows on their way to all ranks that keep these rows."""

    def __init__(self, stored: Vector, rows: KeptRows, layout: RowLayout, across: Collectives) -> None:
        self._stored = stored
        with torch.inference_mode(False), torch.no_grad():
            stored.fetch()
            self._place = stored.take().view(rows.count, -1)[:, : layout.trained_numel]
            self._rows = self._place.contiguous()  # itself, where everything is trained
            self._pending = across.all_gather(self._rows.view(-1))

    def wait(self) -> None:
        self._pending.wait()
        with torch.inference_mode(False), torch.no_grad():
            if self._rows.data_ptr() != self._place.data_ptr():
                self._place.copy_(self._rows)
            self._stored.release(changed=True)
            self._stored.join()
            if self._stored.leaves_late:
                self._stored.flush()
