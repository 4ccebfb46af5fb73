"""Ulysses sequence parallelism: ranks that share sequences exchange heads for positions around every attention."""
