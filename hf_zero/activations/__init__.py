"""What checkpointed calls keep between forward and backward: where it lies, and when it is copied."""
