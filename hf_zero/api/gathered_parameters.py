"""Whole values of sharded parameters, for a while: for generation, surgery and reading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from hf_zero.params.sharded_parameter import ShardedParameter, of
from hf_zero.params.unsharding import reshard, unshard


class GatheredParameters:
    """Context in which `params` have their full values on every rank. Collective: enter and leave it on all ranks.

        with GatheredParameters(model.lm_head.weight, modifier_rank=0):
            if rank == 0:
                model.lm_head.weight.data.normal_()

    Args:
        params: a parameter, a list or any iterable; None and parameters that are not sharded are passed over.
        modifier_rank: whose edits are kept at the end, by all ranks, masters included; None: edits are dropped.
        fwd_module: accepted as in DeepSpeed; which module reads a parameter is seen when it does.
        enabled: False makes the context do nothing.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._handles = handles_of(params) if enabled else []
        self._modifier_rank = modifier_rank

    def __enter__(self) -> None:
        unshard(self._handles)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception ranks may have gone different ways: no collective any more, edits are dropped.
        reshard(self._handles, self._modifier_rank if kind is None else None)


@contextmanager
def gathered(model: nn.Module) -> Iterator[nn.Module]:
    """`model` (an engine gives its own) with whole weights on every rank; edits are dropped at the end. Collective.

    Nests, does nothing below stage 3, and training goes on afterwards as if it had not been entered. Needs memory for
    the whole model; `generate` on the sharded model gathers as it goes, and keeps what stage3_max_live_parameters
    allows.
    """
    inner = getattr(model, "module", model)
    with GatheredParameters(inner.parameters()):
        yield inner


@contextmanager
def unwrap_model_for_generation(engine: Any) -> Iterator[Any]:
    """DeepSpeed's name for `gathered`."""
    with gathered(engine) as model:
        yield model


def handles_of(params: Any) -> list[ShardedParameter]:
    """The sharded ones among `params`, each once, in the order in which they were sharded (the same on all ranks)."""
    candidates: Iterable[Any] = [params] if isinstance(params, Tensor) else (params or ())
    found = {id(handle): handle for handle in map(of, filter(_is_tensor, candidates)) if handle is not None}
    return sorted(found.values(), key=lambda handle: handle.parameter.ds_id)  # type: ignore[attr-defined]


def _is_tensor(candidate: Any) -> bool:
    return isinstance(candidate, Tensor)
