"""Other people's frameworks, unmodified, each in an environment of its own (make test-frameworks)."""
