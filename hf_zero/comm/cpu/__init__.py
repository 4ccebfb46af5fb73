"""Collectives of ranks on CPUs: shared memory within a machine, pairs of ranks over gloo between machines."""
