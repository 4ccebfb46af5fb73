"""Triton forms of the kernels. Imported only when a CUDA tensor arrives, or by tests under Triton's interpreter."""
