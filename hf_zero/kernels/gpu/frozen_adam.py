"""Adam with a frozen variance in Triton: see hf_zero.kernels.frozen_adam for the formulas."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_zero.kernels.gpu.blocks import ANY_INTEGER, launch_update, places, store_weight
from hf_zero.kernels.vectors import Applied, Vectors


@triton.jit(do_not_specialize=ANY_INTEGER)
def _frozen_adam(  # type: ignore[no-untyped-def]
    weight, second_moment, moment, lp_param, rate_tensor, skip, seed,
    numel, rate, eps, weight_decay,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Reads weight, moment, second_moment; writes weight, lp_param:
    16 bytes per element (fp32 masters and variance, bf16 moment and lp_param).
    """
    offsets, mask = places(numel, skip, BLOCK)
    p = tl.load(weight + offsets, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(moment + offsets, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(second_moment + offsets, mask=mask, other=0.0).to(tl.float32)
    if rate_tensor is not None:
        rate = rate * tl.load(rate_tensor)
    root = tl.sqrt(v)
    update = tl.where(root > 0, m / (root + eps), 0.0) + weight_decay * p
    p -= rate * update
    store_weight(weight, lp_param, offsets, p, mask, seed)


def frozen_adam_on_gpu(
    vectors: Vectors, rate: Tensor | float, eps: float, weight_decay: float, skip: Tensor | None
) -> None:
    """A single launch, without synchronization."""
    launch_update(
        _frozen_adam, vectors, Applied(rate, skip),
        eps, weight_decay,
    )  # fmt: skip
