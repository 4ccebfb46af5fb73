"""What programs ask about the installation: version, where it was built from, what it was built with."""

from __future__ import annotations

import torch

from hf_zero.integration.compat.op_builders import NO_OPERATORS
from hf_zero.versions import GIT_BRANCH, GIT_HASH, VERSION

version, git_hash, git_branch = VERSION, GIT_HASH, GIT_BRANCH
version_major, version_minor, version_patch = (int(number) for number in version.partition("+")[0].split("."))
installed_ops = compatible_ops = NO_OPERATORS
accelerator_name = ""
torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "bf16_support": True,
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}


def required_torch_version(min_version: float | None = None, max_version: float | None = None) -> bool:
    """Whether the installed PyTorch lies within these versions, both ends included.

    Raises:
        ValueError: without any.
    """
    from packaging.version import parse

    if min_version is None and max_version is None:
        raise ValueError("required_torch_version(): give min_version, max_version, or both")
    installed = parse(parse(torch.__version__).base_version)
    is_old = min_version is not None and installed < parse(str(min_version))
    is_new = max_version is not None and installed > parse(str(max_version))
    return not is_old and not is_new
