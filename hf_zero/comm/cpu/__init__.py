"""Collectives for CPU ranks: shared memory within a machine, pairs of ranks over gloo between machines."""
