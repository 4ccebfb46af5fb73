"""The tests; a package, so that spawned ranks can import the function they run."""
