"""Tensor parallelism: ranks hold parts of the same matrices, and see the same batches."""
