"""peft.peft_model: saving adapters around matrices of which ranks hold parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_zero.comm.parts import OF_ADAPTERS, refuse_parts
from hf_zero.integration.patches import Patches

PATCHES = Patches("peft.peft_model")


@PATCHES.add(
    "PeftModel.save_pretrained(self, save_directory, safe_serialization, selected_adapters, save_embedding_layers, "
    "is_main_process, path_initial_model_for_weight_conversion, kwargs)",
    without="with tensor parallelism, save_pretrained without a state dict writes the parts that one rank holds",
    until="PEFT asks the library that cut a model for its whole weights",
)
def around_save_pretrained(
    original: Callable[..., None],
    self: Any,
    save_directory: str,
    safe_serialization: bool = True,
    selected_adapters: list[str] | None = None,
    save_embedding_layers: str | bool = "auto",
    is_main_process: bool = True,
    path_initial_model_for_weight_conversion: str | None = None,
    **kwargs: Any,
) -> None:
    """Where no state dict is given, PEFT writes what this rank holds: an adapter that loads nowhere. Gathering here
    would wait for ranks that do not call."""
    if is_main_process and kwargs.get("state_dict") is None:
        refuse_parts(self, dict(self.named_parameters()), OF_ADAPTERS)
    original(
        self,
        save_directory,
        safe_serialization,
        selected_adapters,
        save_embedding_layers,
        is_main_process,
        path_initial_model_for_weight_conversion,
        **kwargs,
    )
