"""Memory of this process: anonymous memory during a block, bytes of live tensors, shared blocks."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hf_zero.comm import collectives_for

_STATUS = Path("/proc/self/status")
_PERIOD_S = 0.001


@dataclass
class Watched:
    """Bytes at the start, and their peak."""

    start: int = 0
    peak: int = 0

    @property
    def grown(self) -> int:
        """The increase of memory above the start."""
        return self.peak - self.start


@contextmanager
def anonymous_memory() -> Iterator[Watched]:
    """Watches RssAnon (memory not backed by files) in a thread until the block ends."""
    watched = Watched(anonymous_bytes())
    watched.peak = watched.start
    done = threading.Event()
    thread = threading.Thread(target=_sample, args=(watched, done), daemon=True)
    thread.start()
    try:
        yield watched
    finally:
        done.set()
        thread.join()
        watched.peak = max(watched.peak, anonymous_bytes())


def anonymous_bytes() -> int:
    """RssAnon of this process."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def _sample(watched: Watched, done: threading.Event) -> None:
    while not done.wait(_PERIOD_S):
        watched.peak = max(watched.peak, anonymous_bytes())


def live_bytes(excluded: Sequence[torch.Tensor] = ()) -> int:
    """Bytes of all storages that live tensors hold, each storage once, without the `excluded` ones."""
    gc.collect()
    left_out = {tensor.untyped_storage().data_ptr() for tensor in excluded}
    storages = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and not candidate.is_meta:
            for tensor in (candidate, candidate.grad) if candidate.is_leaf else (candidate,):
                if tensor is not None:
                    storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(size for pointer, size in storages.items() if pointer not in left_out)


def shared_blocks() -> list[torch.Tensor]:
    """All shared memory for data exchange, this rank's and the others'."""
    link = collectives_for(torch.device("cpu"))._link.link
    return [*link.own.tensors, *(block.bytes for block in link._theirs.values())]


def kept_bytes() -> int:
    """Bytes of this rank's own shared blocks."""
    return sum(block.numel() for block in collectives_for(torch.device("cpu")).buffers())


def most_allocated(profiled: profile) -> int:
    """The largest sum of bytes allocated less bytes freed since the beginning."""
    return max(_running_sums(profiled), default=0)


def still_allocated(profiled: profile) -> int:
    """Bytes allocated less bytes freed, at the end."""
    return _running_sums(profiled)[-1]


def _running_sums(profiled: profile) -> list[int]:
    events = profiled.profiler.kineto_results.events()
    return list(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def profiled_memory() -> profile:
    """Profiles allocations of PyTorch's CPU allocator; for `most_allocated` and `still_allocated`."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)
