"""Around loading at stage 3: notes the checkpoint's keys that find no home in the model, which upstream passes over."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

NOTED = "_hf_zero_unexpected_keys"


def around(original: Callable[..., Any]) -> Callable[..., Any]:
    def _load_state_dict_into_zero3_model(model_to_load: Any, state_dict: Any, load_config: Any = None) -> Any:
        mapping = getattr(load_config, "weight_mapping", None) or []
        vars(model_to_load)[NOTED] = _without_home(model_to_load, list(state_dict), mapping)
        return original(model_to_load, state_dict, load_config)

    return _load_state_dict_into_zero3_model


def _without_home(model: Any, keys: Iterable[str], mapping: Iterable[Any]) -> set[str]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    known = dict.fromkeys(model.state_dict())
    prefix = model.base_model_prefix
    mapping = list(mapping)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    homeless = set()
    for key in keys:
        # By position: the parameter of the prefix was called otherwise at first.
        renamed, _ = rename_source_key(key, renamings, converters, prefix, known)
        if renamed not in known and f"{prefix}.{renamed}" not in known:
            homeless.add(key)
    return homeless
