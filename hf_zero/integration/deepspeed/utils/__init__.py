"""deepspeed.utils: the logger and small helpers."""

from __future__ import annotations

from hf_zero.integration.alias import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "OnDevice": "hf_zero.integration.helpers.OnDevice",
        "RepeatingLoader": "hf_zero.integration.helpers.RepeatingLoader",
        "get_z3_leaf_modules": "hf_zero.zero.leaves.get_z3_leaf_modules",
        "log_dist": "hf_zero.log.log_dist",
        "logger": "hf_zero.log.logger",
        "safe_get_full_fp32_param": "hf_zero.zero.fragments.safe_get_full_fp32_param",
        "safe_get_full_grad": "hf_zero.zero.fragments.safe_get_full_grad",
        "safe_get_full_optimizer_state": "hf_zero.zero.fragments.safe_get_full_optimizer_state",
        "safe_get_local_fp32_param": "hf_zero.zero.fragments.safe_get_local_fp32_param",
        "safe_get_local_grad": "hf_zero.zero.fragments.safe_get_local_grad",
        "safe_get_local_optimizer_state": "hf_zero.zero.fragments.safe_get_local_optimizer_state",
        "safe_set_full_fp32_param": "hf_zero.zero.fragments.safe_set_full_fp32_param",
        "safe_set_full_grad": "hf_zero.zero.fragments.safe_set_full_grad",
        "safe_set_full_optimizer_state": "hf_zero.zero.fragments.safe_set_full_optimizer_state",
        "safe_set_local_fp32_param": "hf_zero.zero.fragments.safe_set_local_fp32_param",
        "safe_set_local_grad": "hf_zero.zero.fragments.safe_set_local_grad",
        "safe_set_local_optimizer_state": "hf_zero.zero.fragments.safe_set_local_optimizer_state",
        "safe_update_full_grad_vectorized": "hf_zero.zero.fragments.safe_update_full_grad_vectorized",
        "set_z3_leaf_module": "hf_zero.zero.leaves.set_z3_leaf_module",
        "set_z3_leaf_modules": "hf_zero.zero.leaves.set_z3_leaf_modules",
        "set_z3_leaf_modules_by_name": "hf_zero.zero.leaves.set_z3_leaf_modules_by_name",
        "set_z3_leaf_modules_by_suffix": "hf_zero.zero.leaves.set_z3_leaf_modules_by_suffix",
        "unset_z3_leaf_modules": "hf_zero.zero.leaves.unset_z3_leaf_modules",
        "z3_leaf_module": "hf_zero.zero.leaves.z3_leaf_module",
    },
    submodules=("tensor_fragment", "zero_to_fp32"),
)
