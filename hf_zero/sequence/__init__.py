"""Ulysses sequence parallelism: ranks hold parts of sequences, and exchange heads for positions around attention."""
