"""peft.tuners.tuners_utils: merging adapters at stage 3. A layer is gathered while it is merged, and the result kept.

PEFT writes into the base layer's weights, which are there only between an evaluation and the next training step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn

from hf_zero.api.gathered_parameters import GatheredParameters
from hf_zero.integration.patches import Function, Patches
from hf_zero.log import logger
from hf_zero.params.partitioning import unpartition
from hf_zero.params.sharded_parameter import of

PATCHES = Patches("peft.tuners.tuners_utils")
_NO_MERGE = "merging adapters may not work at stage 3"


@PATCHES.add("onload_layer(layer)", without=_NO_MERGE, until="PEFT gathers the layer itself, as it does for copies")
@contextmanager
def around_onload_layer(original: Callable[[Any], AbstractContextManager[Any]], layer: Any) -> Iterator[None]:
    """Around `onload_layer`, the context in which PEFT merges and unmerges a layer. Collective at stage 3."""
    is_tuned = hasattr(layer, "base_layer") or hasattr(layer, "unload_and_optionally_merge_module")
    with original(layer), GatheredParameters(_in_shards(layer) if is_tuned else [], modifier_rank=0):
        yield


def _in_shards(layer: nn.Module) -> list[nn.Parameter]:
    """Sharded parameters not held yet: a holder (TRL, to merge for a while) decides about edits itself."""
    handles = ((parameter, of(parameter)) for parameter in layer.parameters())
    return [parameter for parameter, handle in handles if handle is not None and not handle.unshard_count]


@PATCHES.add(
    "BaseTuner.merge_and_unload(self, progressbar, safe_merge, adapter_names)",
    without=_NO_MERGE,
    until="nothing: a model that leaves PEFT has to know what of it stage 3 may keep unsharded",
)
def around_merge_and_unload(
    original: Function,
    self: Any,
    progressbar: bool = False,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
) -> Any:
    """The merged model needs no engine: as long as stage3_max_live_parameters allows, its parameters are plain ones."""
    merged = original(self, progressbar, safe_merge, adapter_names)
    limits = [handle.owner.max_live_numel for handle in map(of, merged.parameters()) if handle and handle.owner]
    if not limits:
        return merged
    numel = sum(parameter.numel() for parameter in merged.parameters())
    if numel <= min(limits):
        unpartition(merged)
    else:
        logger.warning(
            "merge_and_unload: the merged model has %d elements, more than stage3_max_live_parameters (%d) lets "
            "stay whole, and is kept in shards. To save it, on every rank: `with deepspeed.zero.GatheredParameters("
            "list(model.parameters())): model.save_pretrained(folder, is_main_process=...)`",
            numel,
            min(limits),
        )
    return merged
