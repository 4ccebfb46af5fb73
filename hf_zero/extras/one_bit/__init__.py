"""1-bit Adam, 1-bit LAMB and 0/1 Adam, which average compressed momentum instead of gradients."""

from __future__ import annotations

from hf_zero.config.features import Extra
from hf_zero.config.schema.arguments import Check, Only, at_least_zero, beta, betas, count, one_of, steps
from hf_zero.config.schema.fields import as_flag
from hf_zero.config.schema.optimizer_types import OptimizerType, no_amsgrad

_not_published = Only(False, "is not part of the published algorithm; DeepSpeed ignores it")


_backend = one_of(
    ("nccl", "mpi", "hccl", "compressed"), 'must be "nccl", "mpi", "hccl" or "compressed" (it has no effect)'
)


def _above_zero(value: object) -> float:
    number = at_least_zero(value)
    if not number:
        raise ValueError("must be above 0")
    return number


_ONE_BIT: dict[str, Check] = {
    **dict.fromkeys(("lr", "eps", "weight_decay"), at_least_zero),
    "betas": betas,
    **dict.fromkeys(("bias_correction", "eps_inside_sqrt"), _not_published),
    "amsgrad": no_amsgrad,
    "cuda_aware": as_flag,
    "comm_backend_name": _backend,
}


_ONE_BIT_LAMB: dict[str, Check] = {
    **_ONE_BIT,
    **dict.fromkeys(("max_coeff", "min_coeff"), at_least_zero),
    **dict.fromkeys(("factor_max", "factor_min", "factor_threshold"), _above_zero),
    "freeze_step": count,
    "coeff_beta": beta,
}


_ZERO_ONE_ADAM: dict[str, Check] = {
    **_ONE_BIT,
    "var_freeze_step": count,
    **dict.fromkeys(("var_update_scaler", "local_step_scaler", "local_step_clipper"), steps),
}


EXTRA = Extra(
    name="one_bit",
    optimizers=(
        OptimizerType(
            name="OneBitAdam",
            arguments={**_ONE_BIT, "freeze_step": count},
            made_by="hf_zero.extras.one_bit.zero_one_adam:OneBitAdam",
            highest_stage=1,
        ),
        OptimizerType(
            name="OneBitLamb",
            arguments=_ONE_BIT_LAMB,
            made_by="hf_zero.extras.one_bit.lamb:OneBitLamb",
            highest_stage=1,
            whole_tensors=True,
        ),
        OptimizerType(
            name="ZeroOneAdam",
            arguments=_ZERO_ONE_ADAM,
            made_by="hf_zero.extras.one_bit.zero_one_adam:ZeroOneAdam",
            highest_stage=0,
        ),
    ),
)
