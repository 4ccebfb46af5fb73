"""deepspeed.checkpoint.utils: tensors made ready for torch.save."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__, {"clone_tensors_for_torch_save": "hf_zero.integration.helpers.clone_tensors_for_torch_save"}
)
