"""Optimizers that average compressed momentum instead of gradients; others read these two tables alone."""

from hf_zero.optim.onebit.adam import OneBitAdam, OneBitAdamUpdater
from hf_zero.optim.onebit.compressing import CompressingUpdater
from hf_zero.optim.onebit.lamb import OneBitLamb, OneBitLambUpdater
from hf_zero.optim.onebit.zero_one_adam import ZeroOneAdam, ZeroOneAdamUpdater

BY_TYPE = {"onebitadam": OneBitAdam, "onebitlamb": OneBitLamb, "zerooneadam": ZeroOneAdam}
UPDATERS: dict[type, type[CompressingUpdater]] = {
    OneBitAdam: OneBitAdamUpdater,
    OneBitLamb: OneBitLambUpdater,
    ZeroOneAdam: ZeroOneAdamUpdater,
}
