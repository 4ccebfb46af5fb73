"""Number formats: fp16, bf16, autocast, and the dtypes of gradients and buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator

from hf_zero.config.errors import Edit
from hf_zero.config.rules import Advice, Rule, needs
from hf_zero.config.schema.fields import (
    DTYPE_SPELLINGS,
    Count,
    Dtype,
    DtypeName,
    Flag,
    Names,
    NonNegative,
    Positive,
    Section,
    StrictSection,
    as_dtype,
    as_names,
    as_number,
    check,
    ignored,
    supported,
    unsupported,
)

if TYPE_CHECKING:
    from hf_zero.config.schema.root import Root

MAX_SCALE_POWER = 127
MASTERS = "bf16.bf16_master_weights_and_grads"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScalePolicy:
    """Loss scaling, which keeps fp16 gradients within their range."""

    fixed: float | None = None  # a constant scale; None: a dynamic scale, by the rules below
    initial: float = 65536.0
    window: int = 1000  # clean updates before the scale doubles
    minimum: float = 1.0  # an overflow here ends the run
    hysteresis: int = 2  # the number of overflows after which the scale is reduced
    consecutive: bool = False  # a clean update resets the count of overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastPolicy:
    """Forward runs under torch.autocast; parameters keep their dtype."""

    dtype: DtypeName | None  # None: torch's default for the device


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionPolicy:
    """The dtype of each kind of tensor, and the handling of non-finite gradients."""

    model: DtypeName  # "fp32" means that parameters keep their dtype
    communication: DtypeName | None  # dtype of gradient reduction; None: the parameter's own
    accumulation: DtypeName | None  # dtype for accumulating gradients over micro-batches; None: the parameter's own
    skip_nonfinite: bool  # a non-finite gradient on any rank skips the update on all of them
    auto_cast_inputs: bool  # cast floating positional inputs of forward to the model's dtype
    loss_scale: LossScalePolicy | None = None  # None: no loss scaling
    autocast: AutocastPolicy | None = None
    low_precision_masters: bool = False  # 16-bit weights are their own masters
    low_precision_states: bool = False  # optimizer states in the masters' dtype; else at least fp32
    rounds_stochastically: bool = False  # stochastic rounding of bf16 masters after an update; else to nearest
    buffers: DtypeName | None = None  # dtype of floating-point buffers; None: their own
    kept_buffers: tuple[str, ...] | None = None  # patterns of names that `buffers` excepts; None: the model's lists


def _as_autocast_dtype(value: object) -> object:
    """Parse a dtype in any spelling of torch_autocast, which includes "torch.bfloat16"."""
    name = value.lower().removeprefix("torch.") if isinstance(value, str) else value
    return as_dtype(DTYPE_SPELLINGS.get(name, name) if isinstance(name, str) else name)


def _as_loss_scale(value: object) -> float:
    number = as_number(value)
    if number < 0:
        raise ValueError("fp16.loss_scale must be >= 0")  # DeepSpeed's words
    return number


AutocastDtype = Annotated[DtypeName, BeforeValidator(_as_autocast_dtype)]


class Fp16(StrictSection):
    """16-bit training with a scaled loss."""

    enabled: Flag = supported(False, "Cast parameters to fp16, keep fp32 masters, and scale the loss.")
    auto_cast: Flag = supported(False, "Cast floating positional inputs of forward to fp16.")
    loss_scale: Annotated[float, BeforeValidator(_as_loss_scale)] = supported(0.0, "Fixed loss scale; 0: dynamic.")
    initial_scale_power: Count = supported(16, "The first dynamic scale is 2 to this power.")
    loss_scale_window: Positive = supported(1000, "Updates without overflow before the scale doubles.", unit="updates")
    min_loss_scale: NonNegative = supported(1, "Minimum of the scale; an overflow there ends the run with an error.")
    hysteresis: Count = supported(2, "The scale is halved after this many overflows; 0 means 1.")
    consecutive_hysteresis: Flag = supported(False, "An update without overflow resets the count of overflows.")
    fp16_master_weights_and_grads: Flag = supported(
        False, "Use fp16 weights as masters: 10 bytes per parameter with Adam, and updates are rounded to fp16."
    )

    @property
    def is_dynamic(self) -> bool:
        return self.enabled and not self.loss_scale

    rules = (
        needs("fp16.fp16_master_weights_and_grads", "fp16.enabled", raises=AssertionError),
        Rule(
            keys=("fp16.min_loss_scale", "fp16"),
            broken=lambda low, fp16: fp16.is_dynamic and low <= 0,
            rule="a dynamic scale needs a minimum above 0",
            fix="remove it (1), or set fp16.loss_scale",
            edit=Edit.at("fp16.min_loss_scale"),
            unusable=True,
        ),
        Rule(
            keys=("fp16.initial_scale_power", "fp16"),
            broken=lambda power, fp16: fp16.is_dynamic and power > MAX_SCALE_POWER,
            rule=f"2 to this power must fit into fp32 (at most {MAX_SCALE_POWER})",
            fix="16 is usual",
            unusable=True,
        ),
        Rule(
            keys=("fp16.min_loss_scale", "fp16.initial_scale_power", "fp16"),
            broken=lambda low, power, fp16: fp16.is_dynamic and 2.0**power < low,
            rule="the initial scale, 2 to the power {initial_scale_power}, is below it",
            fix="lower it, or raise fp16.initial_scale_power",
        ),
    )


class Bf16(StrictSection):
    """16-bit training without loss scaling."""

    enabled: Flag = supported(False, "Cast parameters to bf16 and keep fp32 masters.")
    check_grad_overflow: Flag = supported(True, "A non-finite gradient on any rank skips the update on all.")
    immediate_grad_update: Flag = ignored(
        False, "Add gradients to their buffer at once.", why="gradients always reach their bucket from a hook", met=True
    )
    bf16_master_weights_and_grads: Flag = supported(
        False, "Use bf16 weights as masters; updates are rounded to bf16, see hf_zero.stochastic_rounding."
    )
    bf16_optimizer_states: Flag = supported(False, "With bf16 masters: keep optimizer states in bf16; else in fp32.")

    rules = (
        Rule(
            keys=("fp16.enabled", "bf16.enabled"),
            at="fp16.enabled, bf16.enabled",
            broken=lambda fp16, bf16: fp16 and bf16,
            rule="bfloat16 and fp16 modes cannot be simultaneously enabled",
            fix="keep bf16 and set fp16.enabled to false",
            edit=Edit.at("fp16.enabled", False),
            raises=AssertionError,
        ),
        needs(MASTERS, "bf16.enabled", raises=AssertionError),
        needs(
            "bf16.bf16_optimizer_states",
            MASTERS,
            raises=AssertionError,
            words="bf16_optimizer_states requires bf16_master_weights_and_grads",
        ),
    )


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
    """Apex's mixed precision, implemented by torch.autocast."""

    enabled: Flag = supported(False, "Run forward under torch.autocast in fp16, with a scaled loss.")
    opt_level: Literal["O0", "O1", "O2", "O3"] = supported(
        "O1", "O0: full precision; O1: torch.autocast; O2 and O3 are refused in favour of fp16.enabled."
    )
    loss_scale: Literal["dynamic"] | NonNegative = supported("dynamic", "Fixed loss scale, or dynamic.")
    min_loss_scale: NonNegative | None = supported(None, "Minimum of a dynamic scale.")
    max_loss_scale: NonNegative = ignored(2.0**24, "Maximum of a dynamic scale.", why="overflows limit the scale")
    verbosity: Count = ignored(1, "Verbosity of Apex.", why="Apex is not used")
    keep_batchnorm_fp32: Flag | None = unsupported(
        None, "Batch norm in fp32.", why="torch.autocast decides by operation"
    )
    master_weights: Flag | None = unsupported(None, "fp32 masters.", why="parameters are fp32 under torch.autocast")
    cast_model_type: Any = unsupported(None, "Dtype of the model.", why="parameters stay fp32; see fp16.enabled")
    patch_torch_functions: Flag | None = ignored(None, "Patch functions.", why="torch.autocast does that by itself")
    cast_model_outputs: Any = unsupported(None, "Dtype of outputs.", why="outputs are returned as the model gives them")
    num_losses: Count = unsupported(1, "Losses with scales of their own.", why="there is one loss scale")

    rules = (
        *(
            Rule(
                keys=("amp.enabled", f"{other}.enabled"),
                at=f"amp.enabled, {other}.enabled",
                broken=lambda amp, enabled: amp and enabled,
                rule=rule,
                fix="set amp.enabled to false",
                edit=Edit.at("amp.enabled", False),
            )
            for other, rule in (
                ("fp16", "amp and fp16 cannot both be enabled"),
                ("bf16", "amp and bf16 cannot both be enabled"),
                ("torch_autocast", "both run forward under torch.autocast"),
            )
        ),
        Rule(
            keys=("amp.opt_level", "amp.enabled"),
            broken=lambda level, enabled: enabled and level in ("O2", "O3"),
            rule="{opt_level} casts the weights themselves to fp16",
            fix='use "fp16": {{"enabled": true}} instead of amp, or "O1"',
        ),
        Advice(
            keys=("amp", "amp.opt_level", "amp.enabled"),
            applies=lambda amp, level, enabled: enabled and level == "O1",
            text="O1 runs as torch.autocast in fp16, not through Apex; bf16.enabled needs no loss scale",
        ),
    )


class DataTypes(Section):
    """Dtypes of gradients and buffers."""

    grad_accum_dtype: Dtype | None = supported(
        None,
        "Dtype gradients are summed in. Unset: the model's.",
        raises=NotImplementedError,
        words="unsupported mix of model_dtype and this",
    )
    param_dtype: Dtype | None = check(None, "Must agree with fp16.enabled and bf16.enabled.")
    buffer_dtype: Dtype | None = supported(
        None,
        "Dtype of floating-point buffers. Unset: their own; BatchNorm's on CPUs follow its weights.",
    )
    keep_in_fp32_modules: Literal["auto"] | Annotated[list[str], BeforeValidator(as_names)] = supported(
        "auto", "Names of buffers that buffer_dtype leaves as they are; auto: the lists of transformers' models."
    )

    rules = (
        Rule(
            keys=("data_types.param_dtype", "fp16.enabled", "bf16.enabled"),
            broken=lambda dtype, fp16, bf16: dtype not in (None, _dtype(fp16, bf16)) and {"dtype": _dtype(fp16, bf16)},
            rule="fp16.enabled and bf16.enabled make the parameters {dtype}",
            fix="remove it; those two keys decide",
            edit=Edit.at("data_types.param_dtype"),
            raises=AssertionError,
        ),
    )


def _dtype(fp16: bool, bf16: bool) -> DtypeName:
    return "bf16" if bf16 else "fp16" if fp16 else "fp32"


def model_dtype(config: Root) -> DtypeName:
    """Return the dtype of the parameters; "fp32" means that they keep their own."""
    return _dtype(config.section(Fp16).enabled, config.section(Bf16).enabled)


def precision_of(config: Root, sequence_size: int = 1) -> PrecisionPolicy:
    """Return the policy for a valid config, and the number of ranks that share a sequence."""
    fp16, bf16, types = config.section(Fp16), config.section(Bf16), config.section(DataTypes)
    amp, under_torch = config.section(Amp), config.section(TorchAutocast)
    autocast = AutocastPolicy(dtype=under_torch.dtype) if under_torch.enabled else None
    if amp.enabled and amp.opt_level != "O0":
        autocast = AutocastPolicy(dtype="fp16")
    communication = config.communication_data_type
    if sequence_size > 1:
        communication = config.seq_parallel_communication_data_type or communication
    loss_scale = None
    if fp16.enabled:
        loss_scale = LossScalePolicy(
            fixed=fp16.loss_scale or None,
            initial=2.0**fp16.initial_scale_power,
            window=fp16.loss_scale_window,
            minimum=float(fp16.min_loss_scale),
            hysteresis=fp16.hysteresis,
            consecutive=fp16.consecutive_hysteresis,
        )
    elif autocast is not None and autocast.dtype == "fp16":  # with the initial scale of torch's GradScaler
        fixed = None if amp.loss_scale == "dynamic" else float(amp.loss_scale) or None
        minimum = 1.0 if amp.min_loss_scale is None else amp.min_loss_scale
        loss_scale = LossScalePolicy(fixed=fixed, window=2000, hysteresis=1, minimum=minimum)
    return PrecisionPolicy(
        model=model_dtype(config),
        communication=communication,
        accumulation=types.grad_accum_dtype,
        skip_nonfinite=bf16.check_grad_overflow or loss_scale is not None,
        auto_cast_inputs=fp16.enabled and fp16.auto_cast,
        loss_scale=loss_scale,
        autocast=autocast,
        low_precision_masters=bf16.bf16_master_weights_and_grads or fp16.fp16_master_weights_and_grads,
        low_precision_states=bf16.bf16_optimizer_states,
        rounds_stochastically=config.hf_zero is not None and config.hf_zero.stochastic_rounding,
        buffers=types.buffer_dtype,
        kept_buffers=None if types.keep_in_fp32_modules == "auto" else tuple(types.keep_in_fp32_modules),
    )
