"""Gradients between autograd and the optimizer: buckets, reduction, accumulation."""
