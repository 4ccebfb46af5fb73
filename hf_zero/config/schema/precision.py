"""Number formats: fp16, bf16, torch_autocast, amp, data_types."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from hf_zero.config.schema.fields import (
    Count,
    Dtype,
    Flag,
    Names,
    NonNegative,
    Positive,
    Section,
    as_dtype,
    as_names,
    check,
    ignored,
    supported,
    unsupported,
)


def _as_autocast_dtype(value: object) -> object:
    """Under torch_autocast every spelling of a dtype counts, "torch.bfloat16" too."""
    spellings = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else value
    return as_dtype(spellings.get(name, name) if isinstance(name, str) else name)


AutocastDtype = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_as_autocast_dtype)]


class Fp16(Section):
    """16-bit training with a scaled loss."""

    enabled: Flag = supported(False, "Cast parameters to fp16, keep fp32 masters, and scale the loss.")
    auto_cast: Flag = supported(False, "Cast floating positional inputs of forward to fp16.")
    loss_scale: NonNegative = supported(0.0, "Fixed loss scale; 0: dynamic.")
    initial_scale_power: Count = supported(16, "The first dynamic scale is 2 to this power.")
    loss_scale_window: Positive = supported(1000, "Clean updates before the scale doubles.", unit="updates")
    min_loss_scale: NonNegative = supported(1, "Floor of the scale; an overflow there ends the run with an error.")
    hysteresis: Count = supported(2, "The scale halves at this many overflows, earlier ones are forgiven; 0 means 1.")
    consecutive_hysteresis: Flag = supported(False, "A clean update refills the forgiveness.")
    fp16_master_weights_and_grads: Flag = supported(
        False, "fp16 weights are their own masters: 10 bytes per parameter with Adam, and updates are rounded to fp16."
    )


class Bf16(Section):
    """16-bit training without loss scaling."""

    enabled: Flag = supported(False, "Cast parameters to bf16 and keep fp32 masters.")
    check_grad_overflow: Flag = supported(True, "A non-finite gradient on any rank skips the update on all.")
    immediate_grad_update: Flag = ignored(
        False, "Add gradients to their buffer at once.", why="gradients always reach their bucket from a hook", met=True
    )
    bf16_master_weights_and_grads: Flag = supported(
        False,
        "bf16 weights are their own masters, and updates are rounded to bf16; see hf_zero.stochastic_rounding.",
    )
    bf16_optimizer_states: Flag = supported(False, "With bf16 masters: optimizer states in bf16 too, else in fp32.")


class TorchAutocast(Section):
    """Forward under torch.autocast."""

    enabled: Flag = supported(False, "Run forward under torch.autocast; parameters keep their dtype.")
    dtype: AutocastDtype | None = supported(
        None, "Lower dtype; unset: torch's choice for the device. fp16 also scales the loss, as torch.amp does."
    )
    lower_precision_safe_modules: Names | None = unsupported(
        None, "Classes that communicate in that dtype.", why="communication_data_type sets one dtype for all gradients"
    )


class Amp(Section):
    """Apex's mixed precision, carried out by torch.autocast."""

    enabled: Flag = supported(False, "Run forward under torch.autocast in fp16, with a scaled loss.")
    opt_level: Literal["O0", "O1", "O2", "O3"] = supported(
        "O1", "O0: nothing is lowered; O1: torch.autocast; O2 and O3 are refused in favour of fp16.enabled."
    )
    loss_scale: Literal["dynamic"] | NonNegative = supported("dynamic", "Fixed loss scale, or dynamic.")
    min_loss_scale: NonNegative | None = supported(None, "Floor of a dynamic scale.")
    max_loss_scale: NonNegative = ignored(2.0**24, "Ceiling of a dynamic scale.", why="overflows hold the scale down")
    verbosity: Count = ignored(1, "How much Apex says.", why="Apex is not used")
    keep_batchnorm_fp32: Flag | None = unsupported(
        None, "Batch norm in fp32.", why="torch.autocast decides by operation"
    )
    master_weights: Flag | None = unsupported(None, "fp32 masters.", why="parameters are fp32 under torch.autocast")
    cast_model_type: Any = unsupported(None, "Dtype of the model.", why="parameters stay fp32; see fp16.enabled")
    patch_torch_functions: Flag | None = ignored(None, "Patch functions.", why="torch.autocast does that by itself")
    cast_model_outputs: Any = unsupported(None, "Dtype of outputs.", why="outputs come as the model gives them")
    num_losses: Count = unsupported(1, "Losses with scales of their own.", why="there is one loss scale")


class DataTypes(Section):
    """Dtypes of what is neither parameter nor optimizer state."""

    grad_accum_dtype: Dtype | None = supported(None, "Dtype gradients are summed in. Unset: the model's.")
    param_dtype: Dtype | None = check(None, "Must agree with fp16.enabled and bf16.enabled.")
    buffer_dtype: Dtype | None = unsupported(
        None, "Cast buffers too.", why="buffers always keep the dtype they came with"
    )
    keep_in_fp32_modules: Literal["auto"] | Annotated[list[str], BeforeValidator(as_names)] = ignored(
        "auto", "Buffers kept in fp32.", why="buffers always keep the dtype they came with"
    )
