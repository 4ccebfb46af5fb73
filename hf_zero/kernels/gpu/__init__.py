"""Triton implementations of the kernels, only imported for CUDA tensors, or by tests with Triton's interpreter.

Types of the callers are imported for annotations only: their files call these forms, which must not need them to run.
"""
