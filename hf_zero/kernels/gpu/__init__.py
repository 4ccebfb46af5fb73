"""Triton implementations of the kernels, only imported for CUDA tensors, or by tests with Triton's interpreter."""
