"""What programs call: initialize, the engine with its surface, and whole values of sharded parameters."""
