"""peft.peft_model: saving adapters around matrices of which ranks hold parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hf_zero.comm.tensor_parts import part_of
from hf_zero.integration.patches import Patches

PATCHES = Patches("peft.peft_model")
_OF_ADAPTERS = (".lora_", ".modules_to_save.")


@PATCHES.add(
    "PeftModel.save_pretrained(self, save_directory, safe_serialization, selected_adapters, save_embedding_layers, "
    "is_main_process, path_initial_model_for_weight_conversion, kwargs)",
    without="with tensor parallelism, save_pretrained without a state dict writes the parts that one rank holds",
    until="PEFT asks whoever cut a model for its whole weights",
)
def around_save_pretrained(original: Callable[..., None]) -> Callable[..., None]:
    """Where no state dict is given, PEFT writes what this rank holds: an adapter that loads nowhere. Gathering here
    would wait for ranks that do not call."""

    def save_pretrained(
        self: Any,
        save_directory: str,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: str | bool = "auto",
        is_main_process: bool = True,
        path_initial_model_for_weight_conversion: str | None = None,
        **kwargs: Any,
    ) -> None:
        if is_main_process and kwargs.get("state_dict") is None:
            _refuse_parts(self)
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

    return save_pretrained


def _refuse_parts(model: nn.Module) -> None:
    """
    Raises:
        ValueError: an adapter of `model` is in parts.
    """
    for name, parameter in model.named_parameters():
        if part_of(parameter) is not None and any(word in name for word in _OF_ADAPTERS):
            raise ValueError(
                f"save_pretrained would write this rank's part of {name}, of which other ranks hold the rest: on every "
                "rank, call state = accelerator.get_state_dict(model) (or engine.module_state_dict()), then "
                "save_pretrained(folder, state_dict=state, is_main_process=...); or Trainer.save_model(folder)"
            )
