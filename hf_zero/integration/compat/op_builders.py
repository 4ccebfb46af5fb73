"""DeepSpeed's builders of compiled operators: there are none here, and what most of them are for works without."""

from __future__ import annotations

from typing import NoReturn

from hf_zero.integration.names.unsupported import refusal

# Class -> the operator's name, under which `__compatible_ops__` and `installed_ops` list it.
OPERATORS = {
    "AsyncIOBuilder": "async_io",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "CPUAdagradBuilder": "cpu_adagrad",
    "CPUAdamBuilder": "cpu_adam",
    "CPULionBuilder": "cpu_lion",
    "DeepCompileBuilder": "dc",
    "EvoformerAttnBuilder": "evoformer_attn",
    "FPQuantizerBuilder": "fp_quantizer",
    "FusedAdamBuilder": "fused_adam",
    "FusedLambBuilder": "fused_lamb",
    "FusedLionBuilder": "fused_lion",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "NotImplementedBuilder": "deepspeed_not_implemented",
    "PinMemoryBuilder": "pin_memory",
    "QuantizerBuilder": "quantizer",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "RandomLTDBuilder": "random_ltd",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "SpatialInferenceBuilder": "spatial_inference",
    "StochasticTransformerBuilder": "stochastic_transformer",
    "TransformerBuilder": "transformer",
    "UtilsBuilder": "utils",
}
NO_OPERATORS = dict.fromkeys(sorted(OPERATORS.values()), False)
"""`deepspeed.git_version_info.installed_ops`: what has been compiled."""
_BY_ANOTHER_WAY = {
    *("async_io", "pin_memory", "cpu_adagrad", "cpu_adam", "cpu_lion", "fused_adam", "fused_lamb", "fused_lion"),
    *("quantizer", "random_ltd"),
}
COMPATIBLE = {name: name in _BY_ANOTHER_WAY for name in NO_OPERATORS}
"""`deepspeed.ops.__compatible_ops__`: programs and tests that find false here leave out what needs the operator, so it
is true where that works without one. A builder has nothing to load all the same."""


class OpBuilder:
    """A builder that builds nothing. Optimizers and offload need none: they run on PyTorch and Triton."""

    NAME = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the operator itself can be loaded: never. `__compatible_ops__` has what works without it."""
        return False

    def load(self, verbose: bool = False) -> NoReturn:
        raise NotImplementedError(refusal(f"ops.op_builder.{type(self).__name__}"))

    jit_load = builder = load


def builder_named(name: str) -> type[OpBuilder]:
    """The builder class of this name; the one of no operator for an unknown name, as in DeepSpeed."""
    return _builders.get(name, _builders["NotImplementedBuilder"])


_builders: dict[str, type[OpBuilder]] = {
    name: type(name, (OpBuilder,), {"NAME": operator}) for name, operator in OPERATORS.items()
}
ALL_OPS = {kind.NAME: kind() for kind in _builders.values()}
"""By name, an object each."""

globals().update(_builders)  # each is imported by its name
