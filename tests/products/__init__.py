"""All combinations of features: which of them train like one process, and which are rejected."""
