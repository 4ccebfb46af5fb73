"""Benchmarks of the engine against other engines, and the results they keep."""
