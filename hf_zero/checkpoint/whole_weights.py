"""Whole weights of a live model into one torch file, gathered and written a few parameters at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

from hf_zero.checkpoint.errors import CheckpointError
from hf_zero.checkpoint.files.stream import Arriving, Awaited, into_place, streamed
from hf_zero.checkpoint.files.torch_file import write_torch_file_as_it_comes
from hf_zero.comm import Collectives
from hf_zero.comm.parts import whole_shape
from hf_zero.params.consolidation import persistent_buffers, state_dict_order, unsharded_values


def save_whole_weights(module: nn.Module, path: Path, collectives: Collectives, *, exclude_frozen: bool) -> None:
    """Rank 0 writes `module.state_dict()` with whole weights; no rank ever holds all of it. Collective.

    Raises:
        CheckpointError: on every rank, when the file could not be written; none is left half-written.
    """
    problem = ""
    arrivals = unsharded_values(module, exclude_frozen=exclude_frozen)
    if collectives.rank == 0:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            state, awaited = _state(module, exclude_frozen=exclude_frozen)
            batches = ([(place := awaited[id(p)], streamed(values, place.dtype))] for p, values in arrivals)
            into_place(path, lambda partial: write_torch_file_as_it_comes(partial, Arriving(state, batches)))
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
    for _ in arrivals:  # the other ranks', and what is left after an error: gathers need everybody
        pass
    problem = str(collectives.gather_objects(problem)[0])
    if problem:
        raise CheckpointError(path, f"was not written ({problem})", "free disk space, or name another folder")


def _state(module: nn.Module, *, exclude_frozen: bool) -> tuple[dict[str, Awaited | Tensor], dict[int, Awaited]]:
    """The state dict with places for its parameters, and the place of each parameter by id."""
    awaited: dict[int, Awaited] = {}
    found: dict[str, Awaited | Tensor] = dict(_detached(persistent_buffers(module)))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad or not exclude_frozen:
            found[name] = awaited.setdefault(id(parameter), Awaited(parameter.dtype, whole_shape(parameter)))
    return {name: found[name] for name in state_dict_order(module) if name in found}, awaited


def _detached(buffers: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, buffer.detach()) for name, buffer in buffers)
