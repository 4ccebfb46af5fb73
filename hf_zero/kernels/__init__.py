"""Kernels, one file each: a plain PyTorch reference and fast implementations. They import no other part of hf_zero."""
