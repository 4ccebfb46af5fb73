"""Benchmarks: the engine beside its peers, and where their numbers are kept."""
