"""Tensor parallelism: ranks hold parts of the same matrices, and process the same batches."""
