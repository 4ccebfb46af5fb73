"""Unmodified frameworks of other projects, each in its own environment (make test-frameworks)."""
