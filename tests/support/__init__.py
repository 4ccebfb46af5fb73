"""Shared helpers of the tests: ranks, launches, models, the plain PyTorch reference."""
