"""peft.peft_model: saving adapters around matrices of which ranks hold parts, and prompts whose encoder stage 3 has
sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hf_zero.comm.parts import OF_ADAPTERS, refuse_parts
from hf_zero.integration.patches import Patches
from hf_zero.params.sharded_parameter import of

PATCHES = Patches("peft.peft_model")


@PATCHES.add(
    "PeftModel.save_pretrained(self, save_directory, safe_serialization, selected_adapters, save_embedding_layers, "
    "is_main_process, path_initial_model_for_weight_conversion, kwargs)",
    without="with tensor parallelism, save_pretrained without a state dict writes the parts that one rank holds, and a "
    "Trainer that saves a prompt at stage 3 hangs",
    until="PEFT asks the library that cut a model for its whole weights, and makes prompts from the state dict it gets",
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
    would wait for ranks that do not call.

    What it writes of a prompt is the output of its encoder, whatever state dict there is, and the encoder gathers its
    shards: with ranks that are not here. So it runs with the weights of the state dict, and ranks that have got none
    from `get_state_dict` do not run it.
    """
    values: Mapping[str, Tensor] | None = kwargs.get("state_dict")
    if is_main_process and values is None:
        refuse_parts(self, dict(self.named_parameters()), OF_ADAPTERS)
    encoders = getattr(self, "prompt_encoder", None)
    is_apart = "state_dict" in kwargs and encoders is not None and any(map(of, encoders.parameters()))
    if is_apart and values is None:
        return
    with _encoding_with(encoders, values if is_apart and values is not None else {}):
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


@contextmanager
def _encoding_with(encoders: Any, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Meanwhile the prompts are made with these weights, by encoders that gather nothing."""
    kept = dict(encoders.items()) if values else {}
    try:
        for name, encoder in kept.items():
            encoders[name] = _twin(encoder, values, f"prompt_encoder.{name}.")
        yield
    finally:
        for name, encoder in kept.items():
            encoders[name] = encoder


def _twin(module: nn.Module, values: Mapping[str, Tensor], prefix: str) -> nn.Module:
    """The module with other weights and without hooks."""
    twin = copy.copy(module)
    vars(twin).update({name: type(hooks)() for name, hooks in vars(module).items() if name.endswith("_hooks")})
    twin._parameters = {name: nn.Parameter(values[prefix + name], False) for name in module._parameters}
    twin._modules = {
        name: None if child is None else _twin(child, values, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    return twin
