"""Rarely used features; found by `hf_zero.config.extras`, and imported by no other module."""
