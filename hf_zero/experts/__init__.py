"""Expert parallelism: ranks hold some experts each, and tokens travel to those that they are routed to."""
