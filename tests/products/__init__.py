"""Every way to combine features: which products of them train as one process does, and which are refused."""
